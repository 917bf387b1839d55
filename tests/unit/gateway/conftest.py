"""A gateway on a real port in front of fake engines, all on one event loop in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import anthropic
import httpx
import openai
import pytest
import uvicorn

from services.common.adapters.registry import AdapterRegistry
from services.common.telemetry.recent_logs import RecentLogs
from services.gateway.api.base.idempotency import Idempotency
from services.gateway.api.base.routing import resource
from services.gateway.api.batches.stores import BatchStores
from services.gateway.api.learning.feedback import open_feedback
from services.gateway.api.learning.learners import open_learners
from services.gateway.api.learning.request_log import open_index
from services.gateway.api.operations.health import HealthServices
from services.gateway.api.responses.serving import ResponseServices
from services.gateway.core.admission import Lifecycle
from services.gateway.core.file_store import FileStore
from services.gateway.inference.context import InferenceContext
from services.gateway.server.app import Stores, create_app
from services.gateway.server.http_protocol import HttpProtocol
from services.gateway.settings import GatewaySettings
from services.learning.canaries.store import CanaryStore
from tests.stack import PATIENCE
from tests.unit.gateway.fake_batches import MemoryBatches
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.fake_learning import MemoryCanaries, MemoryFeedback, MemoryIndex, MemoryLearners
from tests.unit.gateway.fake_responses import MemoryDocuments, MemoryResponses
from tests.unit.gateway.fake_stores import MemoryQueue, MemoryRecords, MemoryStore, MemoryWebhooks

MODEL = "tiny"
T = TypeVar("T")


class Running:
    """The gateway, its engines, and a thread that runs them."""

    def __init__(
        self,
        engines: list[FakeEngine],
        *,
        all_ready: bool = True,
        send_buffer: int = 0,
        batching: Callable[[GatewaySettings], BatchStores] | None = None,
        learns: bool = False,
        stores: Stores | None = None,
        **settings: Any,
    ) -> None:
        """``learns``: feedback, canaries and logged requests are in Redis, too; ``stores``: of adapters and jobs."""
        self._send_buffer = send_buffer
        self._enough: Callable[[Iterator[bool]], bool] = all if all_ready else any
        self.engines = engines
        self.store = MemoryStore()
        self.registry = AdapterRegistry(self.store, MODEL)  # type: ignore[arg-type]
        self.queue = MemoryQueue()
        self.responses = MemoryResponses()
        self.webhooks = MemoryWebhooks()
        self.documents = MemoryDocuments(self.responses)
        self.records = MemoryRecords()
        self.batches = MemoryBatches()
        self.recent = RecentLogs(100)
        self._batching = batching
        self._stores = stores or (lambda _: (self.registry, self.queue))  # type: ignore[assignment, return-value]
        self._feedback = None if learns else MemoryFeedback()
        self._canaries = None if learns else MemoryCanaries()
        self._index = None if learns else MemoryIndex()
        self.learners = None if learns else MemoryLearners()
        self._settings = settings
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._failure: BaseException | None = None

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(60):
            raise RuntimeError(f"the gateway did not start: {self._failure!r}")

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def send(
        self, route: str, body: dict[str, Any], *, headers: Mapping[str, str] = {}, receive_buffer: int = 0
    ) -> socket.socket:
        """A connection on which a request was sent and nothing was read."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        connection = socket.socket()
        connection.settimeout(PATIENCE)
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect((host, int(port)))
        data = json.dumps(body).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {route} HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        connection.sendall(f"{head}{more}\r\n".encode() + data)
        return connection

    def leave(
        self, route: str, body: dict[str, Any], once: Callable[[], bool], headers: Mapping[str, str] = {}
    ) -> None:
        """A client that goes away once something is so, however long its request takes to get there."""
        with self.send(route, body, headers=headers):
            self.wait_for(once)

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the condition did not come true")
            time.sleep(0.005)

    @property
    def inference(self) -> InferenceContext:
        return self._resource(InferenceContext)

    @property
    def lifecycle(self) -> Lifecycle:
        return self._resource(Lifecycle)

    @property
    def idempotency(self) -> Idempotency:
        return self._resource(Idempotency)

    @property
    def response_services(self) -> ResponseServices:
        return self._resource(ResponseServices)

    @property
    def health(self) -> HealthServices:
        return self._resource(HealthServices)

    def _resource(self, kind: type[T]) -> T:
        found = resource(self.app, kind)
        assert found is not None, "the gateway was not started"
        return found

    async def _serve(self) -> None:
        for engine in self.engines:
            await engine.start()
        options: dict[str, Any] = {"served_model_name": MODEL, "status_interval_seconds": 0.05, "log_level": "error"}
        options["batch_workers"] = 0  # tests of batches ask for some
        options["learners"] = False  # tests of learners ask for them
        options["engines"] = ",".join(f"127.0.0.1:{engine.port}" for engine in self.engines)
        settings = GatewaySettings(**{**options, **self._settings})
        batching = self._batching or (lambda _: BatchStores(FileStore(self.store), self.batches, self.batches))  # type: ignore[arg-type]
        self.app = create_app(
            settings,
            recent=self.recent,
            stores=self._stores,
            keep_responses=lambda _: self.responses,  # type: ignore[arg-type, return-value]
            keep_documents=lambda _: self.documents,  # type: ignore[arg-type, return-value]
            keep_feedback=lambda made: self._feedback or open_feedback(made),  # type: ignore[arg-type, return-value]
            keep_canaries=lambda made: self._canaries or CanaryStore(made),  # type: ignore[arg-type, return-value]
            keep_learners=lambda made: self.learners or open_learners(made),  # type: ignore[arg-type, return-value]
            keep_webhooks=lambda _: self.webhooks,  # type: ignore[arg-type, return-value]
            index_requests=lambda made: self._index or open_index(made),  # type: ignore[arg-type, return-value]
            batching=batching,
        )
        listener = socket.socket()
        if self._send_buffer:  # of the kernel; by itself it grows to megabytes
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        protocol = HttpProtocol.of(settings.write_timeout_seconds, lambda: False)
        config = uvicorn.Config(self.app, http=protocol, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline and not serving.done():
            if self.server.started and self._enough(c.ready for c in self.inference.engines.clients):
                self.idempotency.records = self.records
                self._ready.set()
                break
            await asyncio.sleep(0.01)
        await serving
        for engine in self.engines:
            await engine.stop()


Starter = Callable[..., Running]


# For a file: one that nobody asks any more would take a twentieth of a processor, for its engine's status.
@pytest.fixture(scope="module")
def _shared() -> Iterator[Running]:
    running = Running([FakeEngine()])
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def _shared_roomy() -> Iterator[Running]:
    running = Running([FakeEngine(max_model_len=16384)])
    running.start()
    yield running
    running.stop()


def _in_first_state(shared: Running) -> Iterator[Running]:
    fresh = FakeEngine()
    engine = shared.engine
    for name in ("behaviour", "attached", "cached_tokens", "draining", "rejects"):
        setattr(engine, name, getattr(fresh, name))
    engine.requests.clear()
    engine.aborts.clear()
    engine.rollouts.clear()
    engine.histories.kept.clear()
    engine.sessions.opened.clear()
    engine.sessions.futures.clear()
    engine.sessions.refuses, engine.sessions.holds = None, False
    shared.store.objects.clear()
    shared.registry._pointer_cache = {}
    shared.batches.records.clear()
    shared.batches.down = False
    if shared.learners is not None:
        shared.learners.kept.clear()
    shared.store.down = shared.queue.down = shared.responses.down = shared.records.down = False
    shared.responses.records.clear()
    shared.documents.kept.clear()
    shared.records.kept.clear()
    shared.response_services.best_effort._away_until = 0.0
    yield shared
    shared.wait_for(lambda: shared.inference.admission.in_flight == 0)
    shared.wait_for(lambda: not engine.running)


@pytest.fixture
def running(_shared: Running) -> Iterator[Running]:
    """One gateway with one engine, in its first state for every test."""
    yield from _in_first_state(_shared)


@pytest.fixture
def roomy(_shared_roomy: Running) -> Iterator[Running]:
    """The same with a context in which tools and long conversations fit."""
    yield from _in_first_state(_shared_roomy)


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts gateways with other settings or engines."""
    started: list[Running] = []

    def begin(*engines: FakeEngine, **settings: Any) -> Running:
        running = Running(list(engines) or [FakeEngine()], **settings)
        started.append(running)
        running.start()
        return running

    yield begin
    for running in started:
        running.stop()


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    # Without `verify=False` each client would read all certificates of this machine: 25 ms, for no one to be verified.
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as client:
        yield client


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    plain = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE, http_client=plain
    ) as client:
        yield client


@pytest.fixture
def claude(running: Running) -> Iterator[anthropic.Anthropic]:
    plain = anthropic.DefaultHttpxClient(verify=False)
    with anthropic.Anthropic(
        base_url=running.url, api_key="none", max_retries=0, timeout=PATIENCE, http_client=plain
    ) as client:
        yield client
