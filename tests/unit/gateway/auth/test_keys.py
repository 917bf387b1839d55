"""API keys over HTTP: who is let in, with which scope, while the file changes; and that no key leaves the gateway."""

from __future__ import annotations

import json
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.common.security.api_keys import KeyLimits, Scope, new_key
from services.gateway.server.app import create_app
from services.gateway.server.named_files import BadSetting
from services.gateway.settings import GatewaySettings
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import says
from tests.unit.gateway.key_file import CHAT, NO_REDIS, Keys, error_of


def test_without_a_valid_key(door: httpx.Client, keys: Keys) -> None:
    wrong: tuple[Any, ...] = (
        {},
        {"authorization": "Basic dXNlcjpwYXNz"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer " + new_key()},
        {"authorization": "Bearer " + keys.secrets["inference"][:-1]},
        {"authorization": keys.secrets["inference"]},
        {"x-api-key": b"\xff\xfe"},
    )
    for headers in wrong:
        answer = door.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["x-request-id"]
    assert error_of(door.get("/v1/nothing"), 401), "what exists is nobody's business"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{door.base_url}/v1", api_key="sk-wrong", max_retries=0).models.list()


def test_ways_to_send_a_key(door: httpx.Client, keys: Keys) -> None:
    key = keys.secrets["inference"]
    basic = {"authorization": "Basic dXNlcjpwYXNz", "x-api-key": key}
    for headers in ({"authorization": f"bearer  {key}"}, {"x-api-key": key}, basic):
        assert door.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    client = openai.OpenAI(base_url=f"{door.base_url}/v1", api_key=key, max_retries=0)
    assert client.chat.completions.create(**CHAT).choices[0].message.content == "Hello, world"  # type: ignore[arg-type]


def test_reload(guarded: Running, door: httpx.Client, keys: Keys) -> None:
    def status(name: str) -> int:
        return door.get("/v1/models", headers=keys.bearer(name)).status_code

    def failures() -> float:
        return float(guarded.inference.metrics.api_key_reload_failures._value.get())

    keys.add("late", Scope.INFERENCE)
    guarded.wait_for(lambda: status("late") == 200)

    before = failures()
    broken = keys.path.with_suffix(".broken")
    broken.write_text('{"keys": [{"id": "x"}]}')
    broken.replace(keys.path)
    guarded.wait_for(lambda: failures() == before + 1)
    assert status("late") == 200, "a broken file changes nothing"
    keys.path.unlink()
    guarded.wait_for(lambda: failures() == before + 2)
    assert status("late") == 200, "and neither does one that is gone"

    keys.change("late", revoked_at=datetime.now(UTC))
    guarded.wait_for(lambda: status("late") == 401)
    message = error_of(door.get("/v1/models", headers=keys.bearer("late")), 401)["message"]
    assert message == f"the API key {keys.entries['late'].id} has been revoked: ask for a new one"
    for seconds in (0.3, 3, 30):  # a busy machine may read the file when the shorter ones are over
        end = datetime.now(UTC) + timedelta(seconds=seconds)
        keys.change("late", revoked_at=None, expires_at=end)
        while (valid := status("late") == 200) is False and datetime.now(UTC) < end:
            time.sleep(0.01)
        if valid:
            break
    assert valid
    guarded.wait_for(lambda: status("late") == 401, seconds=60)
    del keys.entries["late"]
    keys.write()
    guarded.wait_for(lambda: "not valid here" in door.get("/v1/models", headers=keys.bearer("late")).text)
    assert failures() == before + 2


def test_a_secret_that_is_swapped_by_its_symlink(tmp_path: Path, start: Starter) -> None:
    """As Kubernetes does it: keys.json -> ..data/keys.json, ..data -> a directory."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        Keys(tmp_path / version / "keys.json").write()
    first, second = Keys(tmp_path / "1" / "keys.json"), Keys(tmp_path / "2" / "keys.json")
    first.add("a", Scope.INFERENCE)
    second.add("b", Scope.INFERENCE)
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    running = start(api_keys_file=str(tmp_path / "keys.json"), api_keys_poll_seconds=0.05, redis_url=NO_REDIS)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        assert http.get("/v1/models", headers=first.bearer("a")).status_code == 200
        (tmp_path / "..next").symlink_to("2")
        (tmp_path / "..next").replace(tmp_path / "..data")
        running.wait_for(lambda: http.get("/v1/models", headers=second.bearer("b")).status_code == 200)
        assert http.get("/v1/models", headers=first.bearer("a")).status_code == 401


def test_a_stream_outlives_its_key(guarded: Running, door: httpx.Client, keys: Keys) -> None:
    key = keys.add("brief", Scope.INFERENCE)
    guarded.wait_for(lambda: door.get("/v1/models", headers=keys.bearer("brief")).status_code == 200)
    guarded.engine.behaviour = says("Hello, world", pause=0.05)
    body = CHAT | {"stream": True}
    with door.stream("POST", "/v1/chat/completions", json=body, headers={"x-api-key": key}) as stream:
        lines = stream.iter_lines()
        next(lines)
        keys.change("brief", revoked_at=datetime.now(UTC))
        with httpx.Client(base_url=guarded.url, timeout=PATIENCE, verify=False) as other:
            guarded.wait_for(lambda: other.get("/v1/models", headers=keys.bearer("brief")).status_code == 401)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    guarded.engine.behaviour = says("Hello, world")


@pytest.mark.parametrize("framing", ["content-length: 33000000", "transfer-encoding: chunked"])
def test_no_body_is_read_before_the_key(guarded: Running, framing: str) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
        connection.sendall(head.encode())
        received = b""
        while part := connection.recv(65536):  # to the end: the connection is closed, or this would wait for ever
            received += part
    assert received.startswith(b"HTTP/1.1 401")
    assert b"invalid_api_key" in received


def test_a_client_that_sends_a_large_body_sees_the_refusal(door: httpx.Client) -> None:
    for _ in range(3):
        answer = door.post("/v1/chat/completions", content=b" " * 20_000_000)
        assert error_of(answer, 401)
    assert door.get("/livez").status_code == 200


def test_start_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadSetting) as error:
        create_app(GatewaySettings(api_keys_file=str(tmp_path / "none.json")))
    assert (error.value.param, error.value.message) == (
        "api_keys_file",
        f"{tmp_path}/none.json cannot be read: No such file or directory",
    )
    (tmp_path / "plain.json").write_text(json.dumps({"keys": [{"id": "a", "sha256": new_key(), "scopes": []}]}))
    with pytest.raises(BadSetting, match=r"keys\[0\]\.sha256") as error:
        create_app(GatewaySettings(api_keys_file=str(tmp_path / "plain.json")))
    assert "tp-" not in error.value.message, "not even a wrong file is quoted"
    with pytest.raises(BadSetting) as error:
        create_app(GatewaySettings(audit_log_file=str(tmp_path / "no" / "audit.log")))
    assert error.value.param == "audit_log_file"


def test_limits_of_a_key_and_of_the_gateway(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("own", Scope.INFERENCE, limits=KeyLimits(requests_per_minute=2))
    keys.add("default", Scope.INFERENCE)
    keys.add("free", Scope.INFERENCE, limits=KeyLimits(requests_per_minute=0))
    running = start(api_keys_file=str(keys.path), key_requests_per_minute=3, redis_url=NO_REDIS)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        for name, allowed in (("own", 2), ("default", 3), ("free", 9)):
            for number in range(allowed):
                answer = http.get("/v1/models", headers=keys.bearer(name))
                assert answer.status_code == 200
                left = None if name == "free" else str(allowed - number - 1)
                assert answer.headers.get("x-ratelimit-remaining-requests") == left
        for name, limit, wait in (("own", 2, 30), ("default", 3, 20)):
            answer = http.post("/v1/chat/completions", content=b"{", headers=keys.bearer(name))
            error = error_of(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert f"{limit} requests a minute" in error["message"]
            assert wait - 5 < int(answer.headers["retry-after"]) <= wait
            assert answer.headers["x-ratelimit-limit-requests"] == str(limit)
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        with pytest.raises(openai.RateLimitError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key=keys.secrets["own"], max_retries=0).models.list()
        assert not running.engine.requests
        metrics = http.get("/metrics").text
    assert 'temper_gateway_rate_limited_total{limit="requests"} 3.0' in metrics
    assert "temper_gateway_quota_shared 0.0" in metrics
    assert "temper_gateway_quota_fallbacks_total 1.0" in metrics
