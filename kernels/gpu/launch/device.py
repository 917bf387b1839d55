"""Limits of a GPU, from which the cut of every kernel is chosen. Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

Size = Literal["small", "large", "wide"]
_LARGE, _WIDE = 128 * 1024, 200 * 1024
_PROGRAMMATIC = (9, 0)
_FLOAT8 = (8, 9)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of one GPU, or of the part of it that a process has.

    Raises:
        ValueError: a number that no GPU has.
    """

    name: str
    capability: tuple[int, int]
    """CUDA compute capability."""
    shared_memory: int
    """Most bytes of shared memory of a block, once it has asked for them."""
    multiprocessors: int
    registers: int
    """Most 32-bit registers of a block."""
    l2: int
    """Bytes of the L2 cache."""
    memory: int
    """Bytes of device memory."""
    bandwidth: float
    """Nominal bytes a second of that memory."""

    def __post_init__(self) -> None:
        numbers = (self.shared_memory, self.multiprocessors, self.registers, self.l2, self.memory, self.bandwidth)
        if min(numbers) <= 0 or self.capability < (1, 0):
            raise ValueError(f"limits of a GPU are positive numbers: {self}")

    @property
    def architecture(self) -> int:
        """Number that compilers use: 89 for compute capability 8.9."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def size(self) -> Size:
        """Class of shared memory that cuts are made for: small (99 KiB: sm_86, 89, 120), large (163 KiB: sm_80) or wide
        (227 KiB: sm_90, 100)."""
        if self.shared_memory < _LARGE:
            return "small"
        return "large" if self.shared_memory < _WIDE else "wide"

    @property
    def programmatic_launch(self) -> bool:
        """True if a kernel may start before the one ahead of it has ended (Hopper and later)."""
        return self.capability >= _PROGRAMMATIC

    @property
    def bulk_prefetch(self) -> bool:
        """True if one instruction asks L2 for many bytes (Hopper and later: PTX, cp.async.bulk.prefetch)."""
        return self.capability >= _PROGRAMMATIC

    @property
    def float8(self) -> bool:
        """True if e4m3 conversions and tensor cores are there (Ada and later)."""
        return self.capability >= _FLOAT8

    def wave(self, programs: int) -> int:
        """Number of programs that keeps this device as busy as ``programs`` keep the 132 multiprocessors of an H100 or
        H200, where most numbers were measured; at least 1."""
        return max(1, round(programs * self.multiprocessors / _MEASURED_ON))

    def as_on(self, other: DeviceLimits) -> DeviceLimits:
        """Limits of this device with what another one's kernels may use: its capability, shared memory and registers.
        The rest is what this device has."""
        return replace(
            self,
            name=f"{self.name} as {other.name}",
            capability=min(self.capability, other.capability),
            shared_memory=min(self.shared_memory, other.shared_memory),
            registers=min(self.registers, other.registers),
        )


_MEASURED_ON = 132
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


def _card(
    name: str, capability: tuple[int, int], shared: int, multiprocessors: int, l2: int, gib: int, gb_s: float
) -> DeviceLimits:
    return DeviceLimits(name, capability, shared * _KIB, multiprocessors, 65536, l2 * _MIB, gib * _GIB, gb_s * 1e9)


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the rest: data sheets.
_CARDS = {
    "sm80": _card("A100 80GB", (8, 0), 163, 108, 40, 80, 2039),
    "sm86": _card("A10G", (8, 6), 99, 80, 6, 24, 600),
    "sm89": _card("L4", (8, 9), 99, 58, 48, 24, 300),
    "sm90": _card("H200", (9, 0), 227, 132, 50, 141, 4800),
    "sm100": _card("B200", (10, 0), 227, 148, 126, 180, 8000),
    "sm120": _card("RTX 5090", (12, 0), 99, 170, 96, 32, 1792),
}


def architectures() -> tuple[str, ...]:
    """Names that named() knows, in the order of their capability."""
    return tuple(_CARDS)


def named(architecture: str) -> DeviceLimits:
    """A card that is typical of an architecture, which is named as compilers do.

    Raises:
        ValueError: an architecture that the kernels are not compiled for.
    """
    try:
        return _CARDS[architecture]
    except KeyError:
        raise ValueError(f"{architecture!r} is none of {', '.join(_CARDS)}") from None


@lru_cache
def limits_of(device: torch.device) -> DeviceLimits:
    """Limits of a device of this machine. Where kernels are interpreted or compiled for another machine, on the CPU,
    those of the card that most numbers were measured on."""
    return _read(device)


def _read(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":
        return named("sm90")
    # Imported here: whoever has no GPU needs no Triton.
    from triton.runtime import driver

    found = torch.cuda.get_device_properties(device)
    more = driver.active.utils.get_device_properties(device.index or 0)
    # Twice the clock (double data rate), in kHz, times the bus.
    bandwidth = 2e3 * more["mem_clock_rate"] * more["mem_bus_width"] / 8
    return DeviceLimits(
        name=found.name,
        capability=(found.major, found.minor),
        shared_memory=more["max_shared_mem"],
        multiprocessors=found.multi_processor_count,
        registers=more["max_num_regs"],
        l2=found.L2_cache_size,
        memory=found.total_memory,
        bandwidth=float(bandwidth),
    )
