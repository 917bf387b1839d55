"""Executor of a pod by device: the runner with its caches, and the compute gate that training shares the device by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeAlias

import structlog
import torch

from services.common.telemetry.stopwatch import Stopwatch
from services.engine.compute_sharing.device_order import StreamGate
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.executors.cpu.cache_transfer import CpuCacheTransfer
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.executors.runner import Runner
from services.engine.executors.sleeping_memory import Part, SleepingMemory
from services.engine.kv_offload.messages import CacheTransfer
from services.engine.models.interface import CausalLM
from services.engine.models.lora.slots import LoraSlots
from services.engine.settings import EngineSettings
from services.pod.device import kernels_fit
from services.pod.memory import state_slots, waiting_writes

if TYPE_CHECKING:
    from services.engine.executors.cuda.stream import EngineStream
    from services.engine.executors.tuning.start import Tuning

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceExecutor:
    """Runner of the device's steps, and the copies of its caches."""

    runner: Runner
    transfer: Callable[[str], CacheTransfer]
    """Makes the cache transfer to host memory for a cache identity (see Layout.fingerprint)."""


def build_runner(
    model: CausalLM,
    lora: LoraSlots,
    settings: EngineSettings,
    *,
    num_blocks: int,
    max_model_len: int,
    eos_token_ids: Sequence[int],
    sleeping: SleepingMemory,
) -> DeviceExecutor:
    """Allocates the caches; on a GPU it also compiles the kernels and captures the CUDA graphs.

    Args:
        settings: settings of the device (see EngineSettings.for_device).
        num_blocks: KV blocks, scratch block 0 included.
        sleeping: memory that the caches are a part of.

    Raises:
        DoesNotFit: a kernel asks for more shared memory or registers than the GPU has.
    """
    slots, speculative = state_slots(settings), settings.speculative == "mtp"
    if model.device.type == "cpu":
        cache = model.allocate_cache(num_blocks, settings.block_size, slots)
        sleeping.keep_cache(cache.tensors())
        plain = ModelRunner(model, cache, lora, num_slots=slots, eos_token_ids=eos_token_ids, speculative=speculative)
        return DeviceExecutor(plain, lambda identity: CpuCacheTransfer(cache, identity))
    # Imported here: a pod without a GPU needs no Triton.
    from services.engine.executors.cuda.cache_transfer import CudaCacheTransfer
    from services.engine.executors.mapped_memory import MappedMemory

    host = sleeping.host if isinstance(sleeping, MappedMemory) else None
    with kernels_fit(settings):
        tuning = gpu_tuning(
            model,
            lora,
            settings,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            sleeping=sleeping,
        )
        runner, device_cache = tuning.runner, tuning.cache
        if settings.tune != "off" and not settings.batch_invariant and not tuning.use_kept():
            if settings.tune == "start":
                _search(tuning)
            else:
                log.info("kernels are not tuned to this GPU: `temper tune` does that, in a minute")
        watch = Stopwatch()
        runner.warm_up()
    log.info("graphs captured", graphs=runner.captures, seconds_with_kernels=watch.lap())
    return DeviceExecutor(
        runner, lambda identity: CudaCacheTransfer(device_cache, runner.stream, identity, host_memory=host)
    )


def _search(tuning: Tuning) -> None:
    try:
        tuning.search()
    except Exception as error:  # an engine without it serves as well
        log.warning("tuning failed: the table's configurations are used", error=f"{type(error).__name__}: {error}")


def gpu_tuning(
    model: CausalLM,
    lora: LoraSlots,
    settings: EngineSettings,
    *,
    num_blocks: int,
    max_model_len: int,
    eos_token_ids: Sequence[int],
    sleeping: SleepingMemory | None = None,
) -> Tuning:
    """Runner and caches on a GPU, before anything is captured; arguments as of build_runner().

    Args:
        sleeping: None: nobody sleeps.
    """
    # Imported here: a pod without a GPU needs no Triton.
    from services.engine.executors.cuda.runner import CudaRunner, RunnerLimits, RunnerOptions
    from services.engine.executors.cuda.shapes import verified_rows
    from services.engine.executors.tuning.start import Tuning
    from services.engine.models.device_batch import DeviceCache

    draft_tokens = settings.draft_tokens if settings.speculative == "mtp" else 0
    with nullcontext() if sleeping is None else sleeping.allocating(Part.CACHE):
        cache = DeviceCache.allocate(
            model.config,
            model.dtype,
            model.device,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            num_slots=state_slots(settings),
            kv_dtype=torch.float8_e4m3fn if settings.kv_cache_dtype == "fp8" else None,
            state_dtype=torch.bfloat16 if settings.state_dtype == "bfloat16" else torch.float32,
            draft_layers=settings.drafter_form.layers if draft_tokens else 0,
            waiting_writes=waiting_writes(model.device.type),
            verified_rows=verified_rows(settings.max_num_seqs, draft_tokens) if draft_tokens else 0,
        )
    if sleeping is not None:
        sleeping.keep_cache(cache.tensors())
    pdl = settings.programmatic_launch and model.kernel_configs().device.programmatic_launch
    runner = CudaRunner(
        model,
        cache,
        lora,
        RunnerLimits(
            settings.max_num_seqs,
            settings.token_budget,
            max_model_len,
            largest_graph=settings.cuda_graphs,
            mixed_tokens=settings.mixed_prefill_tokens,
            draft_tokens=draft_tokens,
        ),
        RunnerOptions(batch_invariant=settings.batch_invariant, pdl=pdl),
        eos_token_ids=eos_token_ids,
    )
    return Tuning(
        runner,
        model,
        cache,
        lora,
        settings.tuned_dir,
        settings.tune_seconds,
        max_model_len,
        pdl,
        version("temper"),
    )


def prefill_alignment(settings: EngineSettings) -> int:
    """Alignment of prefill chunks, so that a prompt's bits do not depend on how it was split."""
    if not settings.batch_invariant:
        return 1
    from services.engine.executors.cuda.shapes import INVARIANT_ALIGNMENT

    return INVARIANT_ALIGNMENT


Gate: TypeAlias = SliceGate | StreamGate
Queue: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Context manager inside which a thread's work goes to a queue of the device."""


def build_gate(runner: Runner, device: torch.device, tpot_goal_seconds: float) -> Gate:
    """Compute gate of a device: on the device's streams for CUDA, else on the host."""
    if device.type != "cuda":
        return SliceGate(tpot_goal_seconds)
    # Imported here: a pod without a GPU needs no Triton.
    from services.engine.compute_sharing.device_queue import CudaDeviceQueue

    if (stream := _stream(runner, device).stream) is None:
        raise TypeError(f"steps of a {type(runner).__name__} are not queued on a stream of {device}")
    return StreamGate(tpot_goal_seconds, CudaDeviceQueue(lambda: stream), CudaDeviceQueue(torch.cuda.current_stream))


def step_queue(runner: Runner, device: torch.device) -> Queue:
    """Where a runner's steps are queued: on its stream for CUDA; on the CPU they compute at once."""
    return nullcontext if device.type != "cuda" else _stream(runner, device).active


def _stream(runner: Runner, device: torch.device) -> EngineStream:
    from services.engine.executors.cuda.runner import CudaRunner

    if not isinstance(runner, CudaRunner):
        raise TypeError(f"steps of a {type(runner).__name__} are not queued on a stream of {device}")
    return runner.stream
