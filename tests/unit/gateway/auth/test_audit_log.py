"""The audit log: who changed what, and that no key comes out."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from starlette.types import Message

from services.common.security.api_keys import Scope, digest, new_key
from services.gateway.auth.caller import ON_BEHALF_OF
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.fake_engine import hangs, says
from tests.unit.gateway.key_file import CHAT, Keys


@pytest.mark.usefixtures("log_lines")
def test_a_bug_is_audited_as_one(guarded: Running, door: httpx.Client, keys: Keys) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    current, guarded.registry.current = guarded.registry.current, broken  # type: ignore[method-assign, assignment]
    try:
        assert door.post("/v1/adapters/bot/attach", headers=keys.bearer("admin")).status_code == 500
    finally:
        guarded.registry.current = current  # type: ignore[method-assign]
    guarded.wait_for(lambda: _last(keys)["status"] == 500)
    assert (_last(keys)["target"], _last(keys)["outcome"]) == ("bot", "failed")


def _last(keys: Keys) -> dict[str, Any]:
    return dict(json.loads(keys.path.with_name("audit.log").read_text().splitlines()[-1]))


def test_audit_log(guarded: Running, door: httpx.Client, keys: Keys) -> None:
    path = keys.path.with_name("audit.log")
    rotated = path.with_suffix(".1")
    ours = [f"audited-{number}" for number in range(7)]
    numbers = iter(ours)

    def lines() -> list[dict[str, Any]]:
        """Of this test's requests: those of another may come late."""
        written = [file.read_text() for file in (rotated, path) if file.exists()]
        found = [json.loads(line) for text in written for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return [line for line in found if line["request_id"] in ours]

    def send(
        method: str, route: str, key: str | None = None, *, audited: bool = True, **options: Any
    ) -> httpx.Response:
        """Waits for its line, which is written when the answer is out."""
        before = len(lines())
        headers = {**(keys.bearer(key) if key else {}), "x-request-id": next(numbers)}
        response = door.request(method, route, headers=headers, **options)
        if audited:
            guarded.wait_for(lambda: len(lines()) > before)
        return response

    sft = {"adapter": "bot", "examples": [{"prompt": "2+2", "completion": "4"}]}
    job = send("POST", "/v1/train/sft", "train", json=sft)
    assert job.status_code == 202, job.text
    send("GET", "/v1/train/jobs", "train", audited=False)
    send("POST", "/v1/chat/completions", "inference", audited=False, json=CHAT)
    send("POST", "/v1/adapters/bot/attach", "admin")
    path.rename(rotated)
    send("DELETE", "/v1/adapters/bot", "train")
    send("DELETE", "/v1/adapters/bot")
    files = {"adapter_model.safetensors": b"x", "adapter_config.json": b"{}"}
    send("POST", "/v1/adapters", "admin", data={"name": "mine"}, files=files)
    names = ("principal", "action", "target", "status", "outcome")
    ids = {name: entry.id for name, entry in keys.entries.items()}
    assert [tuple(line[name] for name in names) for line in lines()] == [
        (ids["train"], "POST /v1/train/sft", f"/v1/train/jobs/{job.json()['id']}", 202, "done"),
        (ids["admin"], "POST /v1/adapters/{name}/attach", "bot", 404, "failed"),
        (ids["train"], "DELETE /v1/adapters/{name}", "bot", 403, "refused"),
        (None, "DELETE /v1/adapters/{name}", "bot", 401, "refused"),
        (ids["admin"], "POST /v1/adapters", "mine", 422, "failed"),
    ]
    first = lines()[0]
    assert first["request_id"] == ours[0]
    assert first["client"] == "127.0.0.1"
    assert datetime.fromisoformat(first["time"]).tzinfo is not None


@pytest.mark.usefixtures("log_lines")
def test_no_key_comes_out(
    guarded: Running,
    door: httpx.Client,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Everything that a gateway says or writes, searched for the keys and their digests."""
    unknown = new_key()
    secrets = [unknown, *keys.secrets.values()]
    said: list[str] = []
    caplog.set_level(logging.INFO)
    try:
        for key in (unknown, keys.secrets["admin"]):
            ways = [{"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"authorization": key}]
            for headers in [*ways, {"x-request-id": key}, {"idempotency-key": key, "x-api-key": key}]:
                for method, path in [
                    ("GET", "/v1/models"),
                    ("POST", "/v1/chat/completions"),
                    ("POST", "/v1/train/sft"),
                    ("DELETE", "/v1/adapters/bot"),
                    ("GET", f"/v1/train/jobs/{key}"),
                    ("POST", f"/v1/adapters/{key}/attach"),
                ]:
                    answer = door.request(method, path, json={}, headers=headers)
                    echoed = key in path or "x-request-id" in headers
                    said.append(answer.text if not echoed else "")
        guarded.engine.behaviour = hangs
        reached = lambda: bool(guarded.engine.running)  # noqa: E731
        guarded.leave("/v1/chat/completions", CHAT, reached, keys.bearer("inference"))
        guarded.wait_for(lambda: not guarded.engine.running)
    finally:
        guarded.engine.behaviour = says("Hello, world")
    out, err = capfd.readouterr()
    # Not this client's own lines, nor uvicorn's, which only pytest listens to: gateways have them off.
    others = ("httpx", "httpcore.connection", "httpcore.http11", "uvicorn.access")
    ours = [record.getMessage() for record in caplog.records if record.name not in others]
    said += [out, err, *ours, generate_latest(guarded.inference.metrics.registry).decode()]
    said += [file.read_text() for file in keys.path.parent.glob("audit*")]
    everything = "\n".join(said)
    assert "tp-***" in out, "a key in a path is masked"
    assert keys.entries["admin"].id in everything
    for key in secrets:
        assert key not in everything
        assert key[3:] not in everything
        assert digest(key) not in everything


def test_what_the_gateway_asks_itself_for_somebody(guarded: Running, keys: Keys) -> None:
    """A request of a batch: the key that made the batch must still be valid."""

    async def call(owner: str, path: str) -> int:
        status: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            status.append(message.get("status", 0))

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "state": {}}
        scope |= {"client": None, "server": None, "scheme": "http", "http_version": "1.1", "root_path": ""}
        await guarded.app({**scope, ON_BEHALF_OF: SimpleNamespace(owner=owner)}, receive, send)
        return status[0]

    keys.add("batch", Scope.INFERENCE)
    owner = keys.entries["batch"].id
    guarded.wait_for(lambda: guarded.run(call(owner, "/v1/models")) == 200)
    assert guarded.run(call(owner, "/v1/train/jobs")) == 403
    assert guarded.run(call("anonymous", "/v1/models")) == 401
    keys.change("batch", revoked_at=datetime.now(UTC))
    guarded.wait_for(lambda: guarded.run(call(owner, "/v1/models")) == 401)
