"""An engine under test: its parts, its server and a client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from grpc import aio

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, Unavailable
from services.common.jobs import LoraSettings
from services.common.pb import adapters_pb2_grpc, engine_pb2_grpc
from services.common.pb import engine_pb2 as pb
from services.engine.models.lora.trainable import LoraParams
from services.engine.server.health import HealthReporter, ProcessHealth, Vitals
from services.engine.server.listen import bind
from services.engine.server.service import make_server
from services.engine.server.serving import Serving
from services.gateway.inference.engine_request import version_ref
from services.pod.engine import Engine

T = TypeVar("T")

_numbers = itertools.count()
_OUTER = ("deadline_unix_ms", "timeout_ms", "keep_rollout", "cache_salt", "priority", "request_id", "session")


@dataclass
class Answer:
    """Everything that came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    adapter: str | None = None
    cached_tokens: int = 0
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    error: pb.Error | None = None
    updates: int = 0

    def add(self, update: pb.Update) -> None:
        if self.updates == 0:
            self.adapter = update.adapter
            self.cached_tokens = update.cached_tokens
        self.updates += 1
        self.token_ids.extend(update.token_ids)
        self.sampling_logprobs.extend(update.sampling_logprobs)
        self.logprobs.extend(update.logprobs)
        self.finish_reason = update.finish_reason
        if update.HasField("error"):
            self.error = update.error


def request(prompt: Sequence[int] = (5, 6, 7, 8), *, adapter: str | None = None, **fields: Any) -> pb.GenerateRequest:
    """A greedy request of 8 tokens unless told otherwise.

    Args:
        adapter: None: what is attached; "base", "name", "name@n" or a composition.
        fields: of the request or of its sampling parameters.
    """
    outer = {name: fields.pop(name) for name in _OUTER if name in fields}
    sampling = pb.SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})
    if adapter is None:
        ref = pb.AdapterRef(attached=True)
    elif adapter == "base":
        ref = pb.AdapterRef(base=True)
    else:
        ref = _ref(adapter)
    outer.setdefault("request_id", f"request-{next(_numbers)}")
    return pb.GenerateRequest(prompt_token_ids=list(prompt), sampling=sampling, adapter=ref, **outer)


def _ref(text: str) -> pb.AdapterRef:
    """A named policy, also one that no gateway would send."""
    try:
        return version_ref(text)
    except InvalidRequest:
        name, _, number = text.partition("@")
        return pb.AdapterRef(named=pb.NamedAdapter(name=name, version=int(number or 0)))


class GatewayStream:
    """Stream call like that of a gateway."""

    def __init__(self, stub: engine_pb2_grpc.EngineAsyncStub) -> None:
        self.call = stub.Stream()
        self.answers: dict[str, Answer] = {}
        self.frames = 0
        self.heard: asyncio.Queue[pb.EngineFrame] = asyncio.Queue()
        """Frames that are only of other clients' requests."""
        self.kept: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Event of each request, set when an abort with ``keep_tokens`` is done."""
        self._done: dict[str, asyncio.Event] = {}
        self._first: dict[str, asyncio.Event] = {}
        self._reader = asyncio.create_task(self._read())
        self._writing = asyncio.Lock()

    async def submit(self, message: pb.GenerateRequest) -> str:
        name = message.request_id
        self.answers[name] = Answer()
        self._done[name] = asyncio.Event()
        self._first[name] = asyncio.Event()
        await self._write(pb.ClientFrame(submit=message))
        return name

    async def abort(self, name: str, keep_tokens: int = 0) -> None:
        await self._write(pb.ClientFrame(abort=pb.AbortRequest(request_id=name, keep_tokens=keep_tokens)))

    async def first(self, name: str) -> None:
        """Returns when something came back for the request."""
        await asyncio.wait_for(self._first[name].wait(), 30)

    async def tokens(self, name: str, count: int) -> None:
        """Returns when so many tokens came back."""
        while len(self.answers[name].token_ids) < count:
            self._first[name].clear()
            await self.first(name)

    async def answer(self, name: str) -> Answer:
        await asyncio.wait_for(self._done[name].wait(), 60)
        return self.answers[name]

    async def run(self, message: pb.GenerateRequest) -> Answer:
        return await self.answer(await self.submit(message))

    async def close(self) -> None:
        self.call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _write(self, frame: pb.ClientFrame) -> None:
        # grpc.aio takes one write at a time.
        async with self._writing:
            await self.call.write(frame)

    async def _read(self) -> None:
        async for frame in self.call:
            self.frames += 1
            if not frame.updates:
                self.heard.put_nowait(frame)
            for update in frame.updates:
                if update.kept:
                    self.kept[update.request_id].set()
                    continue
                self.answers[update.request_id].add(update)
                self._first[update.request_id].set()
                if update.finish_reason:
                    self._done[update.request_id].set()


class EngineUnderTest:
    """Starts an engine and its gRPC server on a free port; `stub` and `adapters` talk to it."""

    def __init__(self, engine: Engine, registry: AdapterRegistry) -> None:
        self.engine = engine
        self.registry = registry
        self._streams: list[GatewayStream] = []

    async def __aenter__(self) -> EngineUnderTest:
        await asyncio.to_thread(self.engine.start)
        loop = self.engine.loop
        engine = self.engine
        serving = Serving(
            loop,
            engine.adapters,
            engine.bind,
            engine.read_drafter,
            engine.constraints,
            engine.codec,
            engine.description,
            64,
            lambda: "",
        )
        state = ProcessHealth()
        state.serving(Vitals.of(loop))
        self.health = HealthReporter(state)
        await self.health.publish()
        self.server = make_server(serving, self.health.servicer, 64 * 1024 * 1024)
        self.port = bind(self.server, "127.0.0.1", 0)
        await self.server.start()
        self.channel = aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = engine_pb2_grpc.EngineStub(self.channel)
        self.adapters = adapters_pb2_grpc.AdaptersStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            await stream.close()
        await self.channel.close()
        await asyncio.to_thread(self.engine.stop)
        await self.server.stop(1)

    def stream(self) -> GatewayStream:
        stream = GatewayStream(self.stub)
        self._streams.append(stream)
        return stream

    async def generate(self, message: pb.GenerateRequest) -> Answer:
        answer = Answer()
        async for update in self.stub.Generate(message):
            answer.add(update)
        return answer

    async def status(self) -> pb.EngineStatus:
        return await self.stub.GetStatus(pb.GetStatusRequest())

    async def until(self, condition: Callable[[pb.EngineStatus], bool], timeout: float = 20.0) -> pb.EngineStatus:
        """Waits until the status fulfils a condition."""
        deadline = time.monotonic() + timeout
        while True:
            status = await self.status()
            if condition(status):
                return status
            assert time.monotonic() < deadline, f"never came to be: {status}"
            await asyncio.sleep(0.02)

    async def assert_nothing_left(self) -> None:
        await self.until(lambda s: s.running == s.waiting == s.blocks_used == s.slots_used == 0)
        snapshot = self.engine.adapters.snapshot()
        assert all(loaded.requests == 0 for loaded in snapshot.loaded), snapshot

    async def publish(self, name: str, seed: int, *, attach: bool = True, corrupt: bool = False) -> AdapterVersion:
        """Publishes an adapter of random weights, and attaches it."""
        files = adapter_files(self.engine, seed)
        if corrupt:
            files["adapter_model.safetensors"] = files["adapter_model.safetensors"][:-64]

        def write() -> AdapterVersion:
            manifest = self.registry.publish(
                name, files, base_digest=self.engine.base_digest, job_id=f"{name}-{seed}-{corrupt}"
            )
            if attach:
                self.registry.attach(manifest.ref)
            return manifest.ref

        return await patiently(lambda: asyncio.to_thread(write), Unavailable)


async def patiently(call: Callable[[], Awaitable[T]], error: type[Exception], attempts: int = 5) -> T:
    """Repeats what a busy machine's store may be too slow for."""
    for _ in range(attempts - 1):
        with contextlib.suppress(error):
            return await call()
        await asyncio.sleep(0.5)
    return await call()


def adapter_files(engine: Engine, seed: int) -> dict[str, bytes]:
    """An adapter of rank 4 that is strong enough to change greedy answers."""
    params = LoraParams.create(engine.model.config, LoraSettings(rank=4, alpha=16, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, master in params.named_parameters():
            if name.endswith("lora_B"):
                master.normal_(0.0, 0.05, generator=generator)
    return params.to_files("tiny")
