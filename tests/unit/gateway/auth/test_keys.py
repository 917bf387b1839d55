"""API keys over HTTP: who is let in, with which scope, while the file changes; and that no key leaves the gateway."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import structlog
from prometheus_client import generate_latest
from starlette.routing import Route, compile_path
from starlette.types import Message

from services.common.security.api_keys import KeyLimits, Scope, digest, new_key
from services.common.telemetry.logging import mask_secrets
from services.gateway.auth.principal import INTERNAL
from services.gateway.auth.route_permissions import RULES, UNKNOWN, RuleBook
from services.gateway.server.app import BadSetting, create_app
from services.gateway.settings import GatewaySettings
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, hangs, says
from tests.unit.gateway.key_file import CHAT, NO_REDIS, Keys, error_of


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    keys = Keys(tmp_path_factory.mktemp("keys") / "keys.json")
    for scope in Scope:
        keys.add(scope.value, scope)
    return keys


@pytest.fixture(scope="module")
def guarded(keys: Keys) -> Iterator[Running]:
    options: dict[str, Any] = {"api_keys_file": str(keys.path), "api_keys_poll_seconds": 0.05, "redis_url": NO_REDIS}
    options |= {"audit_log_file": str(keys.path.with_name("audit.log")), "metrics_public": False}
    running = Running([FakeEngine()], **options)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def door(guarded: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=20, verify=False) as client:
        yield client


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


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/v1/chat/completions", "inference"),
        ("POST", "/v1/train/sft", "train"),
        ("GET", "/v1/train/sessions", "train"),
        ("POST", "/v1/adapters", "admin"),
        ("DELETE", "/v1/adapters/bot", "admin"),
        ("POST", "/v1/adapters/bot/merge", "admin"),
    ],
)
def test_a_missing_scope_is_named(door: httpx.Client, keys: Keys, method: str, path: str, scope: str) -> None:
    for other in {"inference", "train", "admin"} - {scope}:
        error = error_of(door.request(method, path, json={}, headers=keys.bearer(other)), 403)
        assert f"lacks the scope {scope}," in error["message"]
        assert keys.entries[other].id in error["message"]
    assert door.request(method, path, json={}, headers=keys.bearer(scope)).status_code not in (401, 403)


def test_open_routes(door: httpx.Client, keys: Keys) -> None:
    for path in ("/livez", "/readyz", "/healthz", "/openapi.json", "/docs"):
        assert door.get(path).status_code == 200
    assert error_of(door.get("/metrics"), 401), "TEMPER_METRICS_PUBLIC is off here"
    assert "temper_gateway_api_keys" in door.get("/metrics", headers=keys.bearer("inference")).text


def test_the_description_names_keys_and_scopes(door: httpx.Client) -> None:
    described = door.get("/openapi.json").json()
    assert set(described["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    attach = described["paths"]["/v1/adapters/{name}/attach"]["post"]
    assert attach["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "Scope of the API key: `admin` or `attach`." in attach["description"]
    assert described["paths"]["/livez"]["get"]["security"] == []
    without_keys = create_app(GatewaySettings()).openapi()["paths"]["/v1/models"]["get"]
    assert without_keys["security"][0] == {}


@pytest.fixture
def log_lines() -> Iterator[None]:
    """Logs as a service writes them, on standard output."""
    steps = [mask_secrets, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    usual = structlog.get_config()
    structlog.configure(processors=steps)
    yield
    structlog.configure(**usual)


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


def _routes(candidates: Any) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, those of included routers too."""
    for candidate in candidates:
        if hasattr(candidate, "effective_candidates"):
            yield from _routes(candidate.effective_candidates())
            continue
        route = getattr(candidate, "original_route", candidate)
        assert isinstance(route, Route), route
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, route.path


def test_every_route_has_a_scope() -> None:
    app = create_app(GatewaySettings())
    routes = [f"{method} {path}" for method, path in _routes(app.routes)]
    assert len(routes) > 30
    missing = set(routes) - {rule.route for rule in RULES}
    assert not missing, "give these routes a scope in services/gateway/auth/route_permissions.py"
    described = {
        f"{method.upper()} {path}" for path, operations in app.openapi()["paths"].items() for method in operations
    }
    assert described <= {rule.route.replace(":path}", "}") for rule in RULES}
    assert len(RULES) == len({rule.route for rule in RULES})


def test_a_path_gets_the_rule_of_its_route() -> None:
    """The table is searched in its own order: it must find what the router would run."""
    app, book = create_app(GatewaySettings()), RuleBook()
    for method, path in _routes(app.routes):
        _, template, convertors = compile_path(path)
        values = {name: "no/such/path" if name == "rest" else f"some-{name}" for name in convertors}
        rule, params = book.find(method, template.format(**values))
        assert rule.route == f"{method} {path}"
        assert params == values
    assert book.find("GET", "/v1/nothing")[0] is UNKNOWN
    assert book.find("PATCH", "/v1/adapters/bot")[0] is UNKNOWN
    assert book.find("HEAD", "/livez")[0].public
    assert not book.find("GET", "/livez/")[0].public
    assert not book.find("POST", "/livez")[0].public


@pytest.mark.parametrize("name", ["inference", "train", None])
def test_no_spelling_of_a_path_is_a_way_around_its_scope(guarded: Running, keys: Keys, name: str | None) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    key = "" if name is None else f"authorization: Bearer {keys.secrets[name]}\r\n"
    for path in (
        "/v1/adapters%0A",
        "/v1/adapters%0a",
        "/v1/adapters?x=/livez",
        "/v1/adapters/bot/attach%0A",
        "/v1/%61dapters",
        "//v1/adapters",
        "/livez/../v1/adapters",
        "/v1/adapters/",
        "/v1/adapters%00",
        "/v1/adapters;x",
        "http://x/v1/adapters",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{key}connection: close\r\ncontent-length: 0\r\n\r\n"
            connection.sendall(head.encode())
            received = b""
            while part := connection.recv(65536):
                received += part
        status = int(received.split()[1])
        assert status == 401 if name is None else status in (400, 403, 404, 405), (path, received)
        if status == 400:
            assert b"adapter name" in received, "the route that refuses names with a slash"


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
    keys.change("late", revoked_at=None, expires_at=datetime.now(UTC) + timedelta(seconds=0.3))
    guarded.wait_for(lambda: status("late") == 200)
    guarded.wait_for(lambda: status("late") == 401)
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
    with httpx.Client(base_url=running.url, timeout=20, verify=False) as http:
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
        with httpx.Client(base_url=guarded.url, timeout=20, verify=False) as other:
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
        with contextlib.suppress(httpx.TimeoutException):
            door.post("/v1/chat/completions", json=CHAT, headers=keys.bearer("inference"), timeout=0.2)
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
        await guarded.app({**scope, INTERNAL: SimpleNamespace(owner=owner)}, receive, send)
        return status[0]

    keys.add("batch", Scope.INFERENCE)
    owner = keys.entries["batch"].id
    guarded.wait_for(lambda: guarded.run(call(owner, "/v1/models")) == 200)
    assert guarded.run(call(owner, "/v1/train/jobs")) == 403
    assert guarded.run(call("anonymous", "/v1/models")) == 401
    keys.change("batch", revoked_at=datetime.now(UTC))
    guarded.wait_for(lambda: guarded.run(call(owner, "/v1/models")) == 401)


def test_limits_of_a_key_and_of_the_gateway(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("own", Scope.INFERENCE, limits=KeyLimits(requests_per_minute=2))
    keys.add("default", Scope.INFERENCE)
    keys.add("free", Scope.INFERENCE, limits=KeyLimits(requests_per_minute=0))
    running = start(api_keys_file=str(keys.path), key_requests_per_minute=3, redis_url=NO_REDIS)
    with httpx.Client(base_url=running.url, timeout=20, verify=False) as http:
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
