"""Two gateways, one Valkey, one engine: what one keeps the other finds, cancels, and declares lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis

from cli.local.ports import claim_ports
from services.common.pb import engine_pb2
from services.common.settings import CommonSettings
from services.gateway.api.responses.store import LOST, ResponseStore
from services.gateway.settings import GatewaySettings
from tests.integration.servers import RunningServer
from tests.stack import clean_environment
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import FakeEngine, says

ROUTE = "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "input": "hi"}
LEASE = 60.0


async def stops_half_way(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Any) -> None:
    """One token, and then nothing."""
    await send(engine_pb2.Update(request_id=request.request_id, token_ids=[97]))
    await asyncio.Event().wait()


@pytest.fixture
def here(valkey: RunningServer, settings: CommonSettings) -> Iterator[Running]:
    """A gateway in this process, with the engine."""
    options = {"redis_url": settings.redis_url, "response_lease_seconds": LEASE, "response_beat_seconds": 0.1}
    running = Running([FakeEngine()], **options)
    running.responses = ResponseStore(GatewaySettings(**options))  # type: ignore[assignment, arg-type]
    running.start()
    yield running
    running.stop()


@pytest.fixture
def there(here: Running, settings: CommonSettings) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A gateway in a process of its own, and its URL."""
    (port,) = claim_ports(1)
    environment = {
        "TEMPER_PORT": str(port.number),
        "TEMPER_ENGINES": f"127.0.0.1:{here.engine.port}",
        "TEMPER_REDIS_URL": settings.redis_url.get_secret_value(),
        "TEMPER_SERVED_MODEL_NAME": MODEL,
        "TEMPER_RESPONSE_BEAT_SECONDS": "0.1",
        "TEMPER_RESPONSE_LEASE_SECONDS": str(LEASE),
        "TEMPER_LOG_LEVEL": "error",
    }
    process = subprocess.Popen([sys.executable, "-m", "services.gateway"], env=clean_environment(environment))
    url = f"http://127.0.0.1:{port.number}"
    try:
        _await(lambda: _ready(url))
        yield process, url
    finally:
        process.kill()
        process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def _await(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_gateways(here: Running, there: tuple[subprocess.Popen[bytes], str], raw: redis.Redis) -> None:
    process, url = there
    with httpx.Client(base_url=here.url, timeout=10) as ours, httpx.Client(base_url=url, timeout=10) as theirs:
        first = ours.post(ROUTE, json=ASK).json()
        assert theirs.get(f"{ROUTE}/{first['id']}").json() == first
        second = theirs.post(ROUTE, json=ASK | {"previous_response_id": first["id"]}).json()
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert len(ours.get(f"{ROUTE}/{second['id']}/input_items").json()["data"]) == 3

        def begin() -> str:
            response_id = str(theirs.post(ROUTE, json=ASK | {"background": True}).json()["id"])
            _await(lambda: ours.get(f"{ROUTE}/{response_id}").json()["status"] == "in_progress")
            return response_id

        here.engine.behaviour = stops_half_way
        cancelled = begin()
        assert ours.post(f"{ROUTE}/{cancelled}/cancel").json()["status"] == "cancelled"
        _await(lambda: len(here.engine.aborts) == 1)
        assert theirs.get(f"{ROUTE}/{cancelled}").json()["status"] == "cancelled"

        lost = begin()
        (key,) = raw.keys(f"*{lost}*")
        aged = raw.hincrbyfloat(key, "beat", -0.9 * LEASE)
        _await(lambda: float(raw.hget(key, "beat")) > aged + 0.8 * LEASE)
        assert ours.get(f"{ROUTE}/{lost}").json()["status"] == "in_progress", "it beats"
        process.kill()
        process.wait()
        raw.hincrbyfloat(key, "beat", -1.1 * LEASE)
        _await(lambda: ours.get(f"{ROUTE}/{lost}").json()["status"] == "failed")
        assert ours.get(f"{ROUTE}/{lost}").json()["error"] == {"code": "server_error", "message": LOST}
        here.engine.behaviour = says("still here")
        assert ours.post(ROUTE, json=ASK).json()["status"] == "completed"
