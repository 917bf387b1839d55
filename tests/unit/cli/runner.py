"""Running the command line against a server of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner, Result

from cli.main import app
from tests.unit.cli.server import Reply, Seen

JOB: dict[str, Any] = {
    "id": "job-1",
    "kind": "sft",
    "adapter": "polite",
    "state": "succeeded",
    "created_at": 1.0,
    "attempts": 1,
    "progress": {"step": 2, "total_steps": 2},
    "metrics": {"loss": 0.5},
    "result_adapter": "polite@1",
}


def temper(*args: str, url: str | None = None, stdin: str | None = None) -> Result:
    command = [*args, "--url", url] if url else list(args)
    return CliRunner().invoke(app, command, input=stdin, env={"TEMPER_URL": None, "COLUMNS": "200", "NO_COLOR": "1"})


def routes(**answers: Reply | Callable[[Seen], Reply]) -> Callable[[Seen], Reply]:
    """By "METHOD path" without the query, with _ for /."""

    def answer(seen: Seen) -> Reply:
        key = f"{seen.method}{seen.path.split('?')[0]}".replace("/", "_").replace("-", "").replace("@", "")
        found = answers.get(key)
        if found is None:
            return Reply({"error": {"message": f"no route {key}", "code": "not_found"}}, 404)
        return found(seen) if callable(found) else found

    return answer


def state(name: str, **more: Any) -> dict[str, Any]:
    return {"kind": "state", "data": {"state": name, **more}}
