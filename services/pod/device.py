"""Device of a pod, and what it refuses: settings that it cannot run, before anything is loaded, and kernels that ask
for more than it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Literal

import torch

from kernels.gpu.launch.device import DeviceLimits, limits_of, named
from kernels.gpu.launch.resources import Excess, excess_of
from services.common.errors import DoesNotFit, InvalidRequest
from services.engine.executors.kernel_archive import unpack_fitting
from services.engine.models.config import ModelConfig
from services.engine.settings import MOST_DRAFTED_ON_GPU, EngineSettings

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs

_BFLOAT16 = (8, 0)
"""First compute capability with bfloat16 tensor cores (Ampere)."""
_FLOAT8 = (8, 9)
"""First compute capability with e4m3 conversions and tensor cores (Ada, then Hopper 9.0)."""


_TRITON = (3, 6)
"""Oldest Triton that compiles the kernels."""
_DECIDE = {
    "attention": ("kv_cache_dtype", "batch_invariant"),
    "delta": ("state_dtype", "speculative"),
    "experts": ("quantization",),
    "linear": ("quantization", "max_lora_rank", "batch_invariant"),
    "lora": ("max_lora_rank",),
}
"""Settings that decide which kernels of a package of kernels/gpu are launched."""
_TUNED = ("attention", "linear")
"""Packages with configurations that are tuned."""
_OFF = {"speculative": "none", "batch_invariant": False}
"""Settings that lead to kernels of their own unless they are off."""


@dataclass(frozen=True, slots=True)
class Device:
    """Properties of a device that the settings and the memory plan depend on."""

    kind: Literal["cpu", "cuda"]
    name: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) on the CPU."""
    triton: str = ""
    """Version of Triton; empty: not installed."""
    limits: DeviceLimits | None = None
    """Limits that kernels are cut up for; None: there are no such kernels here."""

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind)

    def kernels(self) -> KernelConfigs | None:
        """Configurations of the kernels of this device."""
        if self.limits is None:
            return None
        # Imported here: a pod without a GPU needs no Triton.
        from kernels.gpu.configs import KernelConfigs

        return KernelConfigs(self.limits)

    @property
    def has_float8(self) -> bool:
        return self.capability >= _FLOAT8

    @property
    def has_bfloat16(self) -> bool:
        return self.capability >= _BFLOAT16

    @classmethod
    def of(cls, settings: EngineSettings) -> Device:
        """Device that the settings choose.

        Raises:
            InvalidRequest: cuda is asked for and there is none.
        """
        try:
            kind = settings.resolved_device(torch.cuda.is_available())
        except ValueError as error:
            raise InvalidRequest(str(error), param="device") from error
        if kind == "cpu":
            return cls("cpu")
        if not (triton := _triton_version()):
            properties = torch.cuda.get_device_properties(0)
            return cls("cuda", properties.name, (properties.major, properties.minor))
        limits = limits_of(torch.device("cuda", 0))
        if settings.device_limits:
            limits = limits.as_on(named(settings.device_limits))
        return cls("cuda", limits.name, limits.capability, triton, limits)


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def check_device(settings: EngineSettings, device: Device) -> None:
    """Refuses settings that the device cannot run, and a directory for compiled kernels that cannot be written.

    Raises:
        InvalidRequest: the message names the variable, what it needs and what to set instead.
    """
    if device.kind == "cpu":
        _check_cpu(settings)
        return
    _check_gpu(settings, device)
    try:
        settings.kernel_cache_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=settings.kernel_cache_dir):
            pass
    except OSError as error:
        raise InvalidRequest(
            f"TEMPER_CACHE_DIR={settings.cache_dir}: compiled kernels cannot be kept there ({error.strerror}); name "
            "another directory",
            param="cache_dir",
        ) from error


def unpack_kernels(settings: EngineSettings, device: Device) -> None:
    """Fills an empty cache of compiled kernels from an archive that fits the device, if there is one."""
    if device.kind == "cuda" and settings.kernel_archives is not None:
        # Imported here: a pod without a GPU needs no Triton. It knows where it looks, whoever has said so.
        import triton

        arch = 10 * device.capability[0] + device.capability[1]
        unpack_fitting(settings.kernel_archives, Path(triton.knobs.cache.dir), arch, device.triton)


def _check_gpu(settings: EngineSettings, device: Device) -> None:
    if settings.draft_tokens > MOST_DRAFTED_ON_GPU:
        raise InvalidRequest(
            f"TEMPER_DRAFT_TOKENS={settings.draft_tokens}: a step on a GPU checks at most {MOST_DRAFTED_ON_GPU} draft "
            f"tokens of a request, as {1 + MOST_DRAFTED_ON_GPU} writes to a state can wait; lower it, a block drafter "
            "draws fewer tokens, too",
            param="draft_tokens",
        )
    has = f"{device.name} has compute capability {'.'.join(map(str, device.capability))}"
    if not device.has_bfloat16:
        raise InvalidRequest(
            f"{has}: the engine needs 8.0 or higher (bfloat16 tensor cores); use TEMPER_DEVICE=cpu", param="device"
        )
    if tuple(int(part) for part in device.triton.split(".")[:2] if part.isdigit()) < _TRITON:
        raise InvalidRequest(
            f"the GPU's kernels need Triton {'.'.join(map(str, _TRITON))} or newer, there is "
            f"{device.triton or 'none'}: install temper[gpu], or use TEMPER_DEVICE=cpu",
            param="device",
        )
    if device.has_float8:
        return
    if settings.quantization == "fp8":
        raise InvalidRequest(
            f"TEMPER_QUANTIZATION=fp8 needs compute capability 8.9 or higher, {has}; use int4 or none",
            param="quantization",
        )
    if settings.teacher_quantization == "fp8":
        raise InvalidRequest(
            f"TEMPER_TEACHER_QUANTIZATION=fp8 needs compute capability 8.9 or higher, {has}; use int4 or none",
            param="teacher_quantization",
        )
    if settings.kv_cache_dtype == "fp8":
        raise InvalidRequest(
            f"TEMPER_KV_CACHE_DTYPE=fp8 needs compute capability 8.9 or higher, {has}; use auto", param="kv_cache_dtype"
        )
    if settings.prefill_float8 != "none":
        raise InvalidRequest(
            f"TEMPER_PREFILL_FLOAT8={settings.prefill_float8} needs compute capability 8.9 or higher, {has}; set it to "
            "none",
            param="prefill_float8",
        )
    if settings.train_float8:
        raise InvalidRequest(
            f"TEMPER_TRAIN_FLOAT8=true needs compute capability 8.9 or higher, {has}; unset it", param="train_float8"
        )


def with_quantization(
    settings: EngineSettings, device: Device, config: ModelConfig, teacher: ModelConfig | None = None
) -> EngineSettings:
    """Settings with a quantization of "auto" filled in: a checkpoint whose weights are float8 keeps that size on a
    device that has float8, any other is stored as it is.

    Args:
        teacher: config of the second model, if there is one.
    """

    def chosen(asked: str, checkpoint: ModelConfig | None) -> str:
        if asked != "auto":
            return asked
        return "fp8" if checkpoint is not None and checkpoint.float8 is not None and device.has_float8 else "none"

    return settings.model_copy(
        update={
            "quantization": chosen(settings.quantization, config),
            "teacher_quantization": chosen(settings.teacher_quantization, teacher),
        }
    )


def _check_cpu(settings: EngineSettings) -> None:
    allowed: dict[str, tuple[object, ...]] = {
        "quantization": ("none", "auto"),
        "teacher_quantization": ("none", "auto"),
        "kv_cache_dtype": ("auto",),
        "state_dtype": ("float32",),
        "batch_invariant": (False,),
        "train_float8": (False,),
        "device_limits": ("",),
        "device_memory": (0,),
    }
    for name, values in allowed.items():
        value = getattr(settings, name)
        if value not in values:
            raise InvalidRequest(
                f"TEMPER_{name.upper()}={str(value).lower()} needs a GPU, this pod runs on the CPU: leave it at "
                f"{str(values[0]).lower()}",
                param=name,
            )


@contextmanager
def kernels_fit(settings: EngineSettings) -> Iterator[None]:
    """Around whatever launches kernels before the engine serves.

    Raises:
        DoesNotFit: one of them asks for more shared memory or registers than the GPU has.
    """
    try:
        yield
    except Exception as error:
        if (excess := excess_of(error)) is None:
            raise
        raise DoesNotFit(_refusal(excess, settings), param="device") from error


def _refusal(excess: Excess, settings: EngineSettings) -> str:
    found = {name: getattr(settings, name) for name in _DECIDE.get(excess.package, ())}
    ways = [
        f"another TEMPER_{name.upper()} than {str(value).lower()}"
        for name, value in found.items()
        if name not in _OFF or value != _OFF[name]
    ]
    if settings.tune != "off" and excess.package in _TUNED:
        ways.append("TEMPER_TUNE=off (what was tuned is not used)")
    if excess.smaller_cuts:
        ways.append("TEMPER_DEVICE_LIMITS=sm89 (the cuts of cards with 99 KiB of shared memory)")
    return f"{excess}: try {', '.join([*ways, 'another GPU'])}, or TEMPER_DEVICE=cpu"
