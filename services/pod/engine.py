"""Builds the engine of a pod: model, caches, runner, adapters and loop, wired but not started."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from services.common.adapters.drafter_form import MTP_FORM
from services.common.adapters.events import AdapterEvents
from services.common.adapters.manifest import DRAFTER_CONFIG, drafter_form
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, NotFound
from services.common.pb import engine_pb2 as pb
from services.common.storage.object_store import ObjectStore
from services.common.text.tokenizer import TextCodec
from services.engine.adapters.drafter import FollowedDrafter
from services.engine.adapters.loader import AdapterLoader
from services.engine.adapters.manager import AdapterManager
from services.engine.adapters.slot_table import AdapterConfig
from services.engine.compute_sharing.engine_gate import EngineGate
from services.engine.constraints.compiler import CompilerLimits, ConstraintCompiler
from services.engine.constraints.grammars import GrammarLimits
from services.engine.kv_cache.keys import Tier
from services.engine.kv_cache.memory_plan import MemoryPlan
from services.engine.kv_offload.manager import TierManager
from services.engine.loop.loop import EngineLoop
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.models.interface import CausalLM
from services.engine.models.lora.binding import AdapterBinder, BoundAdapter, bind_adapter
from services.engine.models.lora.targets import target_shapes
from services.engine.models.weights.drafter import read_directory, read_drafter, stage_files
from services.engine.observability.events import EventStream
from services.engine.observability.status import TierStatus
from services.engine.server.conversation_session_manager import ConversationSessionManager
from services.engine.settings import EngineSettings
from services.pod.device import Device, check_device, kernels_fit
from services.pod.parts.loaded import LoadedEngine, PlannedEngine
from services.pod.parts.runner import Gate, Queue, build_gate, gpu_tuning, step_queue
from services.pod.parts.tiers import build_tiers

if TYPE_CHECKING:
    from services.engine.executors.tuning.results import Outcome

VERSION = "0.1.0"
_SWITCH_SECONDS = 0.0005
"""Longest time that another thread holds the GIL while the loop's wants it; Python's 5 ms are two steps of a GPU."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Guest:
    """Place of an engine on a device that another one serves from."""

    turns: Callable[[Queue], EngineGate]
    """Given the queue that its steps go to, returns the gate by which they take turns with that one's."""
    nbytes: int
    """Bytes that it may use."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Parts of a serving engine."""

    model: CausalLM
    checkpoint: Path
    """Directory that the model was loaded from."""
    teacher: CausalLM | None
    """Second model, which jobs may distil from."""
    codec: TextCodec
    base_digest: str
    memory: MemoryPlan
    gate: Gate
    adapters: AdapterManager
    bind: Callable[[Mapping[str, bytes]], BoundAdapter]
    """Reads an adapter's files strictly, without loading them."""
    read_drafter: Callable[[Mapping[str, bytes]], Mapping[str, torch.Tensor]]
    """The same of a drafter's."""
    loop: EngineLoop
    tiers: TierManager | None
    loaded: LoadedEngine
    """What outlives it in a sleep that keeps the process."""
    sessions: ConversationSessionManager
    constraints: ConstraintCompiler
    description: pb.Model

    def start(self) -> None:
        """Starts the loop, then the adapters; returns when the attached version serves.

        Raises:
            Unavailable: the object store does not answer.
        """
        self.loop.start()
        if self.tiers is not None:
            self.tiers.start()
        self.adapters.start(self.loop)

    def tier_status(self) -> Mapping[Tier, TierStatus]:
        """Status of every tier; {}: there are none."""
        return {} if self.tiers is None else self.tiers.status()

    def stop(self, seconds: float = 0.0) -> None:
        """Ends all requests and threads.

        Args:
            seconds: longest wait for what the tiers have not written yet.
        """
        self.adapters.stop()
        self.constraints.close()
        self.loop.stop()
        if self.tiers is not None:
            self.tiers.close(seconds)


def tune_interpreter() -> None:
    """Tunes the interpreter for short steps, once everything is loaded: the garbage collector skips what stays anyway
    (a full collection took 260 ms), and threads hand over the GIL soon."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_SECONDS)


def use_threads(threads: int) -> None:
    """Sets how many CPU threads one operator uses; 0: as many as there are cores."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def build_engine(
    settings: EngineSettings,
    registry: AdapterRegistry,
    adapter_events: AdapterEvents | None,
    events: EventStream | None = None,
    store: ObjectStore | None = None,
    *,
    guest: Guest | None = None,
    loaded: LoadedEngine | None = None,
) -> Engine:
    """Wires an engine, and loads what it needs; nothing runs yet.

    Args:
        adapter_events: publications and attachments; None: the pointers are polled.
        events: stream for the engine's events.
        store: object store, for the store tier.
        guest: place on a device that another engine serves from; None: it has the device to itself.
        loaded: of the same settings, with no engine of its own any more; None: the model is loaded, and everything
            allocated.

    Raises:
        CheckpointRejected: the model directory is incomplete or foreign.
        InvalidRequest, DoesNotFit: the settings contradict the device.
    """
    stream = events or EventStream()
    if loaded is None:
        settings = _with_drafter_form(settings, registry)
        loaded = LoadedEngine.load(settings, None if guest is None else guest.nbytes)
    planned, model, teacher, executor = loaded.planned, loaded.model, loaded.teacher, loaded.executor
    settings, codec, base_digest, device = planned.settings, planned.codec, loaded.base_digest, model.device
    constraints = ConstraintCompiler(loaded.vocabulary, compiler_limits(settings), stream)
    bind = partial(bind_adapter, config=model.config, max_rank=settings.max_lora_rank)
    binder = AdapterBinder(model.config, max_rank=settings.max_lora_rank)
    drafter = _drafter(settings, registry, model, base_digest, step_queue(executor.runner, device))
    adapters = AdapterManager(
        registry,
        adapter_events,
        AdapterLoader(registry, loaded.lora, binder, base_digest=base_digest, events=stream),
        AdapterConfig(settings.adapter_slots, settings.adapter_poll_seconds, settings.adapter_wait_seconds),
        stream,
        drafter,
    )
    gate = build_gate(executor.runner, device, settings.tpot_slo_ms / 1000)
    tiers = build_tiers(
        settings,
        planned.hardware,
        executor,
        planned.config,
        base_digest,
        stream,
        wake=lambda: loop.wake(),
        store=store,
    )
    loop = EngineLoop(
        loaded.limits,
        executor.runner,
        adapters,
        gate if guest is None else guest.turns(step_queue(executor.runner, device)),
        RolloutBuffer(settings.rollouts_max, settings.rollouts_ttl_seconds),
        max_waiting=settings.max_waiting,
        adapter_wait_seconds=settings.adapter_wait_seconds,
        events=stream,
        tiers=tiers,
    )
    durable = not {"disk", "store"}.isdisjoint(settings.tiers.split(","))
    sessions = ConversationSessionManager(loop, tiers, durable=durable)
    description = pb.Model(
        name=settings.served_model_name,
        digest=base_digest,
        max_model_len=planned.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=codec.eos_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        parameters=model.config.parameters(),
        max_train_tokens=settings.max_train_tokens,
        max_lora_rank=settings.max_lora_rank,
        adapter_slots=settings.adapter_slots,
        tokenizer_digest=codec.digest,
        version=VERSION,
        teacher="" if teacher is None else teacher.digest,
        tells_kept=True,
        composes=True,
        linear_layers=target_shapes(model.config),
        teacher_vocab_size=0 if teacher is None else teacher.model.config.vocab_size,
        engine=settings.own_name,
    )
    second = None if teacher is None else teacher.model
    return Engine(
        model,
        settings.model,
        second,
        codec,
        base_digest,
        planned.memory,
        gate,
        adapters,
        bind,
        partial(read_drafter, config=model.config, base_digest=base_digest),
        loop,
        tiers,
        loaded,
        sessions,
        constraints,
        description,
    )


def tune_engine(
    settings: EngineSettings, told: Callable[[float, str], None] = lambda _seconds, _text: None
) -> tuple[Outcome, Path | None]:
    """Tunes the kernels of an engine with these settings to its GPU, and keeps what is found for its next start.

    Args:
        told: told of the progress: the seconds used, and what was found, if anything.

    Returns:
        What was found, and the file; None: it could not be written.

    Raises:
        CheckpointRejected, InvalidRequest, DoesNotFit: as of build_engine(), or there is nothing to tune.
    """
    hardware = Device.of(settings)
    if hardware.kind == "cpu":
        raise InvalidRequest("tuning measures kernels of a GPU, and this engine runs on the CPU", param="device")
    if settings.batch_invariant:
        raise InvalidRequest(
            "TEMPER_BATCH_INVARIANT=true has one configuration for all batches, there is nothing to tune: unset it",
            param="batch_invariant",
        )
    check_device(settings, hardware)
    planned = PlannedEngine.of(settings, hardware)
    model = planned.load_model()
    tuning = gpu_tuning(
        model,
        planned.lora_slots(model),
        planned.settings,
        num_blocks=planned.memory.num_blocks,
        max_model_len=planned.max_model_len,
        eos_token_ids=planned.codec.eos_ids,
    )
    with kernels_fit(planned.settings):
        return tuning.search(told)


def _with_drafter_form(settings: EngineSettings, registry: AdapterRegistry) -> EngineSettings:
    """Settings with the form of the drafter that there is at the start: memory and steps are made for it.

    Raises:
        AdapterRejected: its drafter.json is none.
        InvalidRequest: the settings contradict it.
        Unavailable: the object store does not answer.
    """
    config: bytes | None = None
    if (directory := settings.drafter_directory) is not None:
        config = read_directory(directory)[DRAFTER_CONFIG]
    elif (followed := settings.followed_drafter) is not None:
        name, number = followed
        number = number or registry.pointers().current.get(name)
        if number is not None:
            with contextlib.suppress(NotFound):  # it is waited for, as long as the engine runs
                config = registry.files(AdapterVersion(name, number)).get(DRAFTER_CONFIG)
    return settings.drafting_with(MTP_FORM if config is None else drafter_form(config))


def _drafter(
    settings: EngineSettings, registry: AdapterRegistry, model: CausalLM, base_digest: str, queue: Queue
) -> FollowedDrafter | None:
    """Drafter in the store that is to be followed, if there is one; one in a directory is loaded at once.

    Raises:
        AdapterRejected: the directory's files are no drafter of this model.
    """
    stage = partial(stage_files, config=model.config, stage=model.stage_drafter, base_digest=base_digest, queue=queue)
    if (directory := settings.drafter_directory) is not None:
        stage(read_directory(directory))()
        log.info("drafter loaded", directory=str(directory))
    if (followed := settings.followed_drafter) is None:
        return None
    return FollowedDrafter(registry, *followed, stage, base_digest=base_digest)


def compiler_limits(settings: EngineSettings) -> CompilerLimits:
    """Limits of compiling constraints."""
    return CompilerLimits(
        GrammarLimits(
            max_bytes=settings.constraint_max_bytes,
            step_fuel=settings.constraint_step_fuel,
            max_states=settings.constraint_max_states,
        ),
        seconds=settings.constraint_compile_seconds,
        threads=settings.constraint_threads,
        cache_entries=settings.constraint_cache_entries,
        cache_bytes=settings.constraint_cache_bytes,
    )
