"""The cards of docs/guides/cards.md and docs/guides/sizing.md, with the figures that the pages are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.gpu.launch.device import DeviceLimits, architectures, named
from services.pod.device import Device

Proof = Literal["measured", "compiled"]
_GIB = 2**30
_OLDEST_TRITON = "3.6.0"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that can be bought, or a part of one.

    Raises:
        ValueError: an architecture that kernels are not compiled for, or a number that no card has.
    """

    name: str
    free: float
    """GiB that a process finds free, which is less than the name says: ECC, the driver and CUDA's context."""
    architecture: str
    """Name that compilers use, as in sm89."""
    bandwidth: float
    """Nominal GB a second of the memory (10**9 bytes)."""
    source: str
    """Page of the vendor that gives the bandwidth."""
    proof: Proof
    """measured: engine and trainer ran on such a card. compiled: their kernels are compiled for its architecture."""

    def __post_init__(self) -> None:
        if self.architecture not in architectures():
            raise ValueError(f"{self.name}: {self.architecture!r} is none of {', '.join(architectures())}")
        if self.free <= 0 or self.bandwidth <= 0 or not self.source.startswith("https://"):
            raise ValueError(f"{self.name}: free memory and bandwidth are positive, the source is a page: {self}")

    @property
    def free_bytes(self) -> int:
        return int(self.free * _GIB)

    @property
    def limits(self) -> DeviceLimits:
        """Limits of a card that is typical of this one's architecture."""
        return named(self.architecture)

    @property
    def device(self) -> Device:
        """This card as the memory plan sees it."""
        return Device("cuda", self.name, self.limits.capability, _OLDEST_TRITON, self.limits)


_NVIDIA = "https://www.nvidia.com/en-us"
_WHITE_PAPERS = "https://images.nvidia.com/aem-dam/Solutions/geforce"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = f"{_WHITE_PAPERS}/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = f"{_WHITE_PAPERS}/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
# 256 bits of memory at 21 Gbit/s.
_RTX_4070 = f"{_NVIDIA}/geforce/graphics-cards/40-series/rtx-4070-family/"
# Half of the card's memory, so half of its bandwidth.
_MIG = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html"

CARDS = (
    Card("RTX 4070 Ti SUPER, 16 GB", 15.0, "sm89", 672, _RTX_4070, "compiled"),
    Card("L4, 24 GB", 22.0, "sm89", 300, f"{_NVIDIA}/data-center/l4/", "compiled"),
    Card("A10G, 24 GB", 22.0, "sm86", 600, f"{_NVIDIA}/data-center/products/a10-gpu/", "compiled"),
    Card("RTX 3090, 24 GB", 22.0, "sm86", 936, _AMPERE, "compiled"),
    Card("RTX 4090, 24 GB", 22.0, "sm89", 1008, _ADA, "compiled"),
    Card("RTX 5090, 32 GB", 30.0, "sm120", 1792, _BLACKWELL, "compiled"),
    Card("RTX A6000, 48 GB", 44.0, "sm86", 768, f"{_NVIDIA}/design-visualization/rtx-a6000/", "compiled"),
    Card("L40S, 48 GB", 44.0, "sm89", 864, f"{_NVIDIA}/data-center/l40s/", "compiled"),
    Card("A100, 40 GB", 38.9, "sm80", 1555, f"{_NVIDIA}/data-center/a100/", "compiled"),
    Card("A100, 80 GB", 78.7, "sm80", 2039, f"{_NVIDIA}/data-center/a100/", "compiled"),
    Card("H100 MIG 3g.40gb", 38.9, "sm90", 1675, _MIG, "compiled"),
    Card("H100, 80 GB", 78.7, "sm90", 3350, f"{_NVIDIA}/data-center/h100/", "measured"),
    Card("H200, 141 GB", 139.2, "sm90", 4800, f"{_NVIDIA}/data-center/h200/", "measured"),
    Card("B200, 180 GB", 177.0, "sm100", 8000, f"{_NVIDIA}/data-center/dgx-b200/", "compiled"),
)
"""Cards by memory, parts of an H100 before the whole."""


def card(name: str) -> Card:
    """The card of that name.

    Raises:
        KeyError: there is none.
    """
    return {each.name: each for each in CARDS}[name]
