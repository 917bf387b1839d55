"""Idempotency-Key on routes that change something, and where there can be none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.common.adapters.registry import CONFIG, WEIGHTS
from services.common.security.api_keys import Scope
from services.gateway.api.surfaces import API
from tests.stack import PATIENCE
from tests.unit.gateway.api.adapters.test_adapters import config, upload, weights
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import CHAT, NO_REDIS, Keys, error_of

ONCE = {"idempotency-key": "once"}


def replayed(answer: httpx.Response) -> bool:
    return answer.headers.get("idempotency-replayed") == "true"


def test_an_upload_happens_once(running: Running, http: httpx.Client) -> None:
    def send(key: str, value: float = 1.0) -> httpx.Response:
        files = {WEIGHTS: weights(value), CONFIG: config()}
        return http.post("/v1/adapters", data={"name": "bot"}, files=files, headers={"idempotency-key": key})

    first, second = send("a"), send("a")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert (replayed(first), replayed(second)) == (False, True)
    assert second.headers["content-type"] == "application/json"
    assert [version["id"] for version in http.get("/v1/adapters/bot/versions").json()["data"]] == ["bot@1"]
    error = error_of(send("a", 2.0), 409)
    assert error["param"] == "idempotency-key"
    assert send("b").json()["id"] == "bot@2"


def test_each_route_keeps_its_answer(running: Running, http: httpx.Client) -> None:
    upload(http)
    upload(http)
    for method, path, body in (
        ("POST", "/v1/adapters/bot/attach", {"version": 1}),
        ("POST", "/v1/adapters/bot/detach", None),
        ("POST", "/v1/adapters/bot/rollback", None),
        ("POST", "/v1/adapters/bot/prune", {"keep": 1}),
        ("DELETE", "/v1/adapters/bot", None),
    ):
        headers = {"idempotency-key": f"{method} {path}".replace(" ", "_")}
        answers = [http.request(method, path, json=body, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        assert [replayed(answer) for answer in answers] == [False, True]
        assert answers[0].json() == answers[1].json()
    opened = [http.post("/v1/train/sessions", json={}, headers=ONCE) for _ in range(2)]
    assert [answer.status_code for answer in opened] == [201, 201]
    assert opened[0].content == opened[1].content
    assert opened[1].headers["location"] == f"/v1/train/sessions/{opened[0].json()['id']}"
    assert len(running.engine.sessions.opened) == 1


def test_the_same_key_for_something_else(running: Running, http: httpx.Client) -> None:
    upload(http)
    assert http.post("/v1/adapters/bot/attach", headers=ONCE).status_code == 200
    error_of(http.post("/v1/adapters/bot/attach", json={"version": 1}, headers=ONCE), 409)
    error_of(http.post("/v1/adapters/bot/detach", headers=ONCE), 409)
    assert replayed(http.post("/v1/adapters/bot/attach", headers=ONCE))


def test_a_refusal_is_not_kept(running: Running, http: httpx.Client) -> None:
    assert http.post("/v1/adapters/bot/attach", headers=ONCE).status_code == 404
    upload(http)
    answer = http.post("/v1/adapters/bot/attach", headers=ONCE)
    assert answer.status_code == 200
    assert not replayed(answer)


def test_while_the_first_runs(running: Running, http: httpx.Client) -> None:
    upload(http)
    held, go = threading.Event(), threading.Event()
    attach = running.registry.attach

    def slow(version: object) -> None:
        held.set()
        go.wait(10)
        attach(version)  # type: ignore[arg-type]

    running.registry.attach = slow  # type: ignore[assignment]
    try:
        first: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: first.append(http.post("/v1/adapters/bot/attach", headers=ONCE)))
        thread.start()
        assert held.wait(10)
        answer = http.post("/v1/adapters/bot/attach", headers=ONCE)
        assert error_of(answer, 409)["code"] == "request_in_progress"
        assert answer.headers["retry-after"] == "1"
        go.set()
        thread.join()
    finally:
        running.registry.attach = attach  # type: ignore[method-assign]
    assert first[0].status_code == 200
    assert replayed(http.post("/v1/adapters/bot/attach", headers=ONCE))


def test_without_redis_a_key_is_refused_and_no_key_is_served(running: Running, http: httpx.Client) -> None:
    upload(http)
    running.records.down = True
    answer = http.post("/v1/adapters/bot/attach", headers=ONCE)
    assert error_of(answer, 503)["code"] == "unavailable"
    assert "retry-after" in answer.headers
    assert http.get("/v1/adapters").json()["attached"] is None
    assert http.post("/v1/adapters/bot/attach").status_code == 200


def test_redis_that_goes_while_the_request_runs(running: Running, http: httpx.Client) -> None:
    upload(http)
    attach, detach = running.registry.attach, running.registry.detach

    def then_away(version: object) -> None:
        attach(version)  # type: ignore[arg-type]
        running.records.down = True

    running.registry.attach = then_away  # type: ignore[assignment]
    try:
        assert http.post("/v1/adapters/bot/attach", headers=ONCE).status_code == 200, "it has happened"
        running.records.down = False
        assert http.post("/v1/adapters/bot/attach", headers=ONCE).status_code == 409, "until the claim ends"
    finally:
        running.registry.attach = attach  # type: ignore[method-assign]
    detach("bot")


@pytest.mark.parametrize("key", ["x" * 257, "a b", "ä"])
def test_keys_that_are_none(http: httpx.Client, key: str) -> None:
    answer = http.post("/v1/adapters/bot/attach", headers={"idempotency-key": key.encode("latin-1")})
    assert error_of(answer, 400)["param"] == "idempotency-key"


def test_completions_cannot_keep_their_answer(running: Running, http: httpx.Client) -> None:
    for stream in (False, True):
        error = error_of(http.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=ONCE), 400)
        assert error["param"] == "idempotency-key"
        assert "leave the header out" in error["message"]
    assert not running.engine.requests


def test_the_description_says_which_routes_take_it(http: httpx.Client) -> None:
    taking = {
        f"{method.upper()} {path}": any(one["name"] == "idempotency-key" for one in operation.get("parameters", ()))
        for path, operations in http.get("/openapi.json").json()["paths"].items()
        for method, operation in operations.items()
    }
    assert sum(taking.values()) > 10
    declared = {
        permission.route.replace(":path}", "}"): permission.idempotent
        for routes in API
        for permission in routes.permissions
    }
    assert taking == {route: declared[route] for route in taking}


@pytest.fixture
def two(tmp_path: Path, start: Starter) -> Iterator[tuple[Keys, httpx.Client]]:
    keys = Keys(tmp_path / "keys.json")
    keys.add("a", Scope.ADMIN)
    keys.add("b", Scope.ADMIN)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        yield keys, http


def test_keys_belong_to_their_principal(two: tuple[Keys, httpx.Client]) -> None:
    keys, http = two
    files = {WEIGHTS: weights(), CONFIG: config()}
    for name, version in (("a", "bot@1"), ("b", "bot@2"), ("a", "bot@1")):
        answer = http.post("/v1/adapters", data={"name": "bot"}, files=files, headers={**ONCE, **keys.bearer(name)})
        assert answer.json()["id"] == version
