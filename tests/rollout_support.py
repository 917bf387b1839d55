"""A pod without its stores: the tiny model's engine in this process, as the trainer sees it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry, Pointers
from services.common.errors import ModelNotFound
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.grants import Grants
from services.engine.observability.events import EventStream
from services.engine.requests.adapter import AdapterChoice, PrivateVersion
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.settings import EngineSettings
from services.pod.engine import Engine, build_engine
from services.pod.host import PodHost
from services.pod.rollouts.source import EngineRollouts
from services.trainer.evaluation.judge import EngineJudge

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny"
TIMEOUT = 60.0


@dataclass
class _Manifest:
    digest: str
    base_digest: str = ""
    kind: str = "adapter"


@dataclass
class MemoryRegistry:
    """Versions in memory, as the adapter manager asks for them."""

    versions: dict[AdapterVersion, Mapping[str, bytes]] = field(default_factory=dict)
    attached: AdapterVersion | None = None

    def pointers(self) -> Pointers:
        current = {version.name: version.version for version in sorted(self.versions)}
        return Pointers(self.attached, current, repr((self.attached, sorted(self.versions))))

    def current(self, name: str) -> AdapterVersion:
        found = [version for version in sorted(self.versions) if version.name == name]
        if not found:
            raise ModelNotFound(f"no adapter {name}")
        return found[-1]

    def manifest(self, version: AdapterVersion) -> _Manifest:
        if version not in self.versions:
            raise ModelNotFound(f"no version {version}")
        return _Manifest(f"digest of {version}")

    def files(self, version: AdapterVersion) -> Mapping[str, bytes]:
        return self.versions[version]


class User:
    """A client of the engine that is in a hurry."""

    def __init__(self, engine: Engine) -> None:
        self._loop = engine.loop
        self._changed = threading.Condition()
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, SequenceUpdate] = {}
        self.ended_at: dict[str, float] = {}
        self._count = 0

    def submit(self, prompt: tuple[int, ...], *, adapter: AdapterChoice | None = None, **sampling: Any) -> str:
        with self._changed:
            self._count += 1
            name = f"user-{self._count}"
            self.tokens[name] = []
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling})
        self._loop.submit(Submission(name, prompt, params, adapter or AdapterChoice()), self._take)
        return name

    def answer(self, name: str) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.ended, TIMEOUT)
            assert self.ended[name].error is None, self.ended[name].error
            return self.tokens[name]

    def _take(self, updates: list[SequenceUpdate]) -> None:
        with self._changed:
            for update in updates:
                if update.token is not None:
                    self.tokens[update.request_id].append(update.token.token_id)
                if update.finish_reason is not None:
                    self.ended[update.request_id] = update
                    self.ended_at[update.request_id] = time.monotonic()
            self._changed.notify_all()


@dataclass
class Pod:
    engine: Engine
    host: PodHost
    registry: MemoryRegistry

    def user(self) -> User:
        return User(self.engine)

    def slots_taken(self) -> int:
        """Of private policies."""
        table = self.engine.adapters._table
        with self.engine.adapters._changed:
            return sum(isinstance(r.version, PrivateVersion) for r in table._by_slot.values())

    def settle(self) -> None:
        """Waits until nothing runs, then checks the books."""
        wait_for(lambda: (c := self.engine.loop.status().counts).running == c.waiting == 0)
        wait_for(lambda: self.engine.loop.status().background == 0)
        self.engine.loop.call_at_boundary(self.engine.loop._pipeline.scheduler.check_integrity).result(TIMEOUT)
        # What a step in flight wrote to goes back once it was read, and the status says so at the boundary behind.
        wait_for(lambda: (c := self.engine.loop.status().counts).blocks_used == c.slots_used == 0)
        assert self.slots_taken() == 0


def wait_for(condition: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)


@contextlib.contextmanager
def running_pod(
    *,
    sequences: int = 64,
    timeout_seconds: float = TIMEOUT,
    webhooks: Webhooks | None = None,
    registry: AdapterRegistry | None = None,
    events: EventStream | None = None,
    **settings: Any,
) -> Iterator[Pod]:
    """An engine of the tiny model on the CPU, started, and its host. Small unless told otherwise.

    Args:
        registry: None: versions in memory, which ``Pod.registry`` has.
    """
    torch.set_num_threads(1)
    chosen: dict[str, Any] = {
        "model": TINY,
        "device": "cpu",
        "max_num_seqs": 8,
        "token_budget": 128,
        "num_blocks": 257,
        "max_model_len": 256,
        "state_snapshots": 8,
        "adapter_slots": 3,
        "max_lora_rank": 8,
        "adapter_poll_seconds": 0.2,
        "adapter_wait_seconds": 2.0,
        "max_train_tokens": 256,
        **settings,
    }
    memory = MemoryRegistry()
    engine = build_engine(EngineSettings(**chosen), registry or cast(AdapterRegistry, memory), None, events=events)
    engine.start()
    rollouts = EngineRollouts(
        engine.loop,
        engine.adapters.private,
        vocab_size=engine.model.config.vocab_size,
        sequences=sequences,
        timeout_seconds=timeout_seconds,
    )
    host = PodHost(
        model=engine.model,
        codec=engine.codec,
        base_digest=engine.base_digest,
        gate=engine.gate,
        max_train_tokens=chosen["max_train_tokens"],
        max_lora_rank=chosen["max_lora_rank"],
        train_memory_bytes=2**31,
        checkpoint=engine.checkpoint,
        adapters=engine.adapters,
        rollouts=rollouts,
        grants=Grants(webhooks or Webhooks(), judge=EngineJudge(rollouts, engine.codec)),
        teacher=engine.teacher,
    )
    try:
        yield Pod(engine, host, memory)
    finally:
        engine.stop()
