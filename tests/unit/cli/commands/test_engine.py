"""`temper engine`: what is asked, and what is waited for."""

from __future__ import annotations

import json

from typer.testing import CliRunner, Result

from cli.main import app
from tests.unit.cli.server import Reply, Seen, serving


def engine(*args: str) -> Result:
    return CliRunner().invoke(app, ["engine", *args], env={"COLUMNS": "200", "NO_COLOR": "1"})


def listed(*states: str) -> Reply:
    data = [{"id": f"id{n}", "name": f"engine-{n}", "state": state} for n, state in enumerate(states)]
    return Reply({"object": "list", "data": data})


def test_sleep_waits_for_the_engines_that_were_chosen() -> None:
    looks = iter((listed("going_to_sleep", "awake"), listed("away", "awake"), listed("asleep", "awake")))

    def answer(seen: Seen) -> Reply:
        if seen.method == "GET":
            return next(looks)
        one = {"id": "id0", "name": "engine-0", "state": "going_to_sleep"}
        return Reply({"object": "list", "data": [one]}, status=202)

    with serving(answer) as (url, requests):
        done = engine("sleep", "--engine", "engine-0", "--level", "cache", "--url", url, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["data"] == [{"id": "id0", "name": "engine-0", "state": "asleep"}]
    asked = "/v1/engine/sleep?engine=engine-0&level=cache"
    assert [request.path for request in requests] == [asked, *["/v1/engine"] * 3]


def test_wake_that_takes_too_long_ends_with_a_code_of_its_own() -> None:
    with serving(lambda seen: listed("waking" if seen.method == "POST" else "away")) as (url, _):
        late = engine("wake", "--timeout", "0", "--url", url)
        assert late.exit_code == 4
        assert "temper engine list" in late.stderr
        assert engine("wake", "--no-wait", "--url", url).exit_code == 0
        assert "away" in engine("list", "--url", url).stdout
