"""Engines that evaluate checkpoint directories: each as a pod's, with the base alone, on a device of its own or in the
turns of a trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from services.common.adapters.registry import AdapterRegistry
from services.common.jobs.scorers.grants import Grants
from services.common.storage.directory_store import DirectoryStore
from services.engine.models.config import ModelConfig
from services.engine.models.interface import resolve_dtype
from services.engine.models.registry import read_config
from services.engine.settings import EngineSettings
from services.pod.device import Device
from services.pod.engine import Engine, Guest, build_engine
from services.pod.host import PodHost
from services.pod.memory import plan
from services.pod.parts.runner import Queue
from services.pod.rollouts.source import EngineRollouts
from services.trainer.host.policy_host import ComputeGate

_SEQUENCES = 64
"""Items that are answered at once, at most."""
_TOKENS = 512
"""Tokens of a step: a user's step waits for one in a pod."""
_CONTEXT = 8192
"""Longest item with its answer, if the checkpoint's context is longer."""
_KV_BYTES = 2**28
_ALL = 2**60
"""Bytes of a device that everything fits."""
_ANSWER_SECONDS = 24 * 3600.0
"""Longest time for a shard of items. Nobody waits for it but this run, which can be stopped."""


class TrainerTurns:
    """Gate of a guest engine: each of its steps is a piece of the host's training. Implements EngineGate.

    Args:
        gate: of the engine that serves from the device.
        queue: that the guest's steps go to. The gate orders what its thread queues there and what the other engine
            queues, one behind the other.
    """

    contended = True
    """One step at a time, so that the host's come between."""

    def __init__(self, gate: ComputeGate, queue: Queue) -> None:
        self._gate, self._queue = gate, queue
        self._turn: ExitStack | None = None

    def acquire(self) -> None:
        """See EngineGate."""
        turn = ExitStack()
        turn.enter_context(self._queue())
        turn.enter_context(self._gate.training())
        self._turn = turn

    def release(self, step_seconds: float) -> None:
        """See EngineGate."""
        del step_seconds
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    def launching(self) -> AbstractContextManager[None]:
        """See EngineGate."""
        return nullcontext()

    def engine_idle(self) -> None:
        """See EngineGate: between steps it holds nothing."""


def engine_settings(directory: Path, device: str) -> EngineSettings:
    """Settings of an engine that answers items, whatever the environment says of an engine that serves."""
    return _settings(read_config(directory), device).model_copy(update={"model": directory})


def _settings(config: ModelConfig, device: str) -> EngineSettings:
    return EngineSettings.model_validate(
        {
            "device": device,
            "trainer": False,
            "max_num_seqs": _SEQUENCES,
            "token_budget": _TOKENS,
            "max_model_len": min(_CONTEXT, config.max_position_embeddings),
            "kv_cache_bytes": _KV_BYTES,
            "state_snapshots": 16,
            "adapter_slots": 2,
            "max_lora_rank": 1,
            "cuda_graphs": 0,
            "tune": "kept",
            "tiers": "",
            "max_waiting": 0,
            "adapter_poll_seconds": 3600.0,
        }
    )


def engine_bytes(config: ModelConfig, device: str) -> int:
    """Bytes that such an engine of a model needs, whatever there is: the sum of its memory plan, and the share that an
    engine leaves free."""
    settings = _settings(config, device)
    hardware = Device.of(settings)
    planned = plan(config, settings, resolve_dtype(settings.dtype, hardware.torch), hardware, _ALL)[1]
    return math.ceil(planned.total / settings.memory_fraction)


@contextmanager
def opened(settings: EngineSettings, scratch: Path, grants: Grants, guest: Guest | None = None) -> Iterator[PodHost]:
    """An engine of a checkpoint directory that runs, as a trainer sees it.

    Args:
        scratch: directory in which there are no adapters.
        grants: what scorers of suites may use.
        guest: its place, if another engine serves from the device.

    Raises:
        CheckpointRejected, InvalidRequest, DoesNotFit: as of build_engine.
    """
    engine = build_engine(settings, AdapterRegistry(DirectoryStore(scratch), "base"), None, guest=guest)
    engine.start()
    try:
        yield host_of(engine, grants)
    finally:
        engine.stop()


def host_of(engine: Engine, grants: Grants) -> PodHost:
    """Policy host of an engine that trains nothing."""
    return PodHost(
        model=engine.model,
        codec=engine.codec,
        base_digest=engine.base_digest,
        gate=engine.gate,
        max_train_tokens=1,
        max_lora_rank=1,
        train_memory_bytes=0,
        checkpoint=engine.checkpoint,
        adapters=engine.adapters,
        rollouts=EngineRollouts(
            engine.loop,
            engine.adapters.private,
            vocab_size=engine.model.config.vocab_size,
            sequences=_SEQUENCES,
            timeout_seconds=_ANSWER_SECONDS,
        ),
        grants=grants,
    )
