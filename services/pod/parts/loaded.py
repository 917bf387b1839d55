"""Loaded part of an engine: what takes long to make, holds the device's memory, and outlives a sleep that keeps the
process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog
import torch

from services.common.errors import CheckpointRejected, InvalidRequest
from services.common.telemetry.stopwatch import Stopwatch, rate
from services.common.text.tokenizer import TextCodec
from services.engine.constraints.vocabulary import Vocabulary
from services.engine.executors.sleeping_memory import FixedMemory, HostPages, Part, SleepingMemory
from services.engine.kv_cache.memory_plan import MemoryPlan
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.config import ModelConfig
from services.engine.models.interface import CausalLM, resolve_dtype
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.registry import load_model, read_config
from services.engine.scheduler.config import SchedulerConfig
from services.engine.settings import EngineSettings
from services.pod.device import Device, check_device, unpack_kernels, with_quantization
from services.pod.memory import device_bytes, limit_allocations, plan, state_slots, storage, teacher_storage
from services.pod.parts.runner import DeviceExecutor, build_runner, prefill_alignment
from services.pod.teacher import TeacherModel, load_teacher, second_config

_RATE = {"cuda": 5e14, "cpu": 2e10}
"""First estimate of the floating-point operations a second for a long prompt; an H200 was measured at 5.4e14."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine before anything of it is loaded."""

    settings: EngineSettings
    """Settings with what the plan fills in."""
    hardware: Device
    codec: TextCodec
    config: ModelConfig
    memory: MemoryPlan
    dtype: torch.dtype

    @classmethod
    def of(cls, settings: EngineSettings, hardware: Device, available: int | None = None) -> PlannedEngine:
        """Plan of an engine: what does not fit is refused with its numbers before anything is loaded.

        Args:
            available: bytes that it may use; None: all that the device has left.

        Raises:
            CheckpointRejected: the model directory is incomplete or foreign.
            InvalidRequest, DoesNotFit: the settings contradict the device.
        """
        codec = TextCodec.from_directory(settings.model)
        config = read_config(settings.model)
        if codec.vocab_size > config.vocab_size:
            raise CheckpointRejected(
                f"{settings.model}: the tokenizer has {codec.vocab_size} tokens, the model {config.vocab_size}"
            )
        teacher_config = second_config(settings, codec)
        settings = with_quantization(settings, hardware, config, teacher_config)
        storage(settings, hardware).check(config)
        dtype = resolve_dtype(settings.dtype, hardware.torch)
        if teacher_config is not None:
            teacher_storage(settings, hardware).check(teacher_config)
        if available is None:
            available = device_bytes(hardware, int(settings.device_memory))
        settings, memory = plan(config, settings, dtype, hardware, available, teacher_config)
        log.info(
            "memory plan",
            sequences=settings.max_num_seqs,
            tokens=settings.token_budget,
            snapshots=settings.state_snapshots if settings.prefix_cache else 0,
            adapter_slots=settings.adapter_slots,
            context=memory.capacity_tokens,
            **memory.parts(),
        )
        limit_allocations(hardware, settings)
        return cls(settings, hardware, codec, config, memory, dtype)

    @property
    def max_model_len(self) -> int:
        return self.memory.model_len(self.config.max_position_embeddings, self.settings.max_model_len)

    def load_model(self) -> CausalLM:
        """Loads the model that serves.

        Raises:
            CheckpointRejected: its files are incomplete or foreign.
        """
        settings, watch = self.settings, Stopwatch()
        model = load_model(
            settings.model,
            dtype=self.dtype,
            device=self.hardware.torch,
            storage=storage(settings, self.hardware),
            mtp=settings.speculative == "mtp",
            form=settings.drafter_form,
            kernels=self.hardware.kernels(),
        )
        seconds = watch.lap()
        nbytes = model.nbytes()
        log.info("weights loaded", bytes=nbytes, seconds=seconds, gb_per_second=rate(nbytes, seconds))
        if settings.trains_in_float8:
            model.train_in_float8()
        return model

    def lora_slots(self, model: CausalLM) -> LoraSlots:
        """Slots for the adapters of a loaded model."""
        settings = self.settings
        return LoraSlots(
            model.config,
            settings.adapter_slots + 1,
            settings.max_lora_rank,
            model.dtype,
            model.device,
            invariant=settings.batch_invariant,
        )

    def limits(self) -> SchedulerConfig:
        """Configuration of the scheduler.

        Raises:
            InvalidRequest: the settings contradict each other.
        """
        settings, config, memory = self.settings, self.config, self.memory
        try:
            return SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                token_budget=settings.token_budget,
                block_size=settings.block_size,
                num_blocks=memory.num_blocks,
                num_slots=state_slots(settings),
                max_model_len=self.max_model_len,
                eos_token_ids=frozenset(self.codec.eos_ids),
                prefix_cache=settings.prefix_cache,
                cache_journal=bool(settings.kv_events),
                mixed_prefill_tokens=settings.mixed_prefill_tokens,
                prefill_alignment=prefill_alignment(settings),
                draft_tokens=settings.draft_tokens if settings.speculative == "mtp" else 0,
                block_bytes=memory.kv // memory.num_blocks,
                slot_bytes=memory.states // state_slots(settings),
                token_seconds=2 * config.parameters() / _RATE[self.hardware.kind],
                attention_cost=2 * config.cache_layout.kv_layers * config.query_size / config.parameters(),
                snapshot_interval=settings.snapshot_interval,
                session_seconds=settings.session_seconds,
                most_sessions=settings.max_sessions,
                load_patience=settings.tier_load_seconds,
                load_share=settings.tier_load_share,
            )
        except ValueError as error:
            raise InvalidRequest(f"settings: {error}") from error


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine's model, caches and compiled steps on their device."""

    planned: PlannedEngine
    limits: SchedulerConfig
    base_digest: str
    vocabulary: Vocabulary
    model: CausalLM
    teacher: TeacherModel | None
    lora: LoraSlots
    executor: DeviceExecutor
    sleeping: SleepingMemory

    @classmethod
    def load(cls, settings: EngineSettings, available: int | None = None) -> LoadedEngine:
        """Loads the model and allocates everything.

        Args:
            available: bytes that it may use, of a device that another engine serves from; None: all that are left.

        Raises:
            CheckpointRejected: the model directory is incomplete or foreign.
            InvalidRequest, DoesNotFit: the settings contradict the device.
        """
        hardware = Device.of(settings)
        check_device(settings, hardware)
        unpack_kernels(settings, hardware)
        planned = PlannedEngine.of(settings, hardware, available)
        settings, codec, limits = planned.settings, planned.codec, planned.limits()
        sleeping = sleeping_memory(hardware)
        with ThreadPoolExecutor(2) as pool:  # the digest reads the same pages as the loader
            digest = pool.submit(checkpoint_digest, settings.model)
            vocabulary = pool.submit(Vocabulary, codec, planned.config.vocab_size, settings.mask_threads)
            with sleeping.allocating(Part.WEIGHTS):
                model = planned.load_model()
                teacher = load_teacher(settings, model, teacher_storage(settings, hardware))
                lora = planned.lora_slots(model)
            executor = build_runner(
                model,
                lora,
                settings,
                num_blocks=planned.memory.num_blocks,
                max_model_len=planned.max_model_len,
                eos_token_ids=codec.eos_ids,
                sleeping=sleeping,
            )
            base_digest = digest.result()
            log.info("checkpoint identified", digest=base_digest)
            return cls(planned, limits, base_digest, vocabulary.result(), model, teacher, lora, executor, sleeping)


def sleeping_memory(hardware: Device) -> SleepingMemory:
    """Memory of an engine on this hardware."""
    if hardware.kind == "cpu":
        return HostPages()
    # Imported here: the calls of CUDA's driver come with torch for CUDA only.
    from services.engine.executors.mapped_memory import MappedMemory

    try:
        return MappedMemory(hardware.torch)
    except ImportError as error:  # a torch of another packager; it serves as well
        log.warning("this engine sleeps at level process only: cuda-bindings is not installed", error=str(error))
        return FixedMemory()
