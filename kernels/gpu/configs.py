"""Configurations of the kernels that serving launches, by the device's limits or as tuned on it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.gpu.attention.decode import DecodeConfig, decode_config
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.linear.skinny import Weight, weight_kind
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig, choose, most_rows


@dataclass(slots=True)
class Tuned:
    """Configurations that were measured on this very device. The autotuner tries one after the other by writing it
    here before it captures a step; nothing changes once requests are served."""

    products: dict[tuple[Kind, int, int, int], SkinnyConfig | None] = field(default_factory=dict)
    """By kind, outputs and inputs of the weight, and the rows of x. None: the vendor's product, the rest in kernels of
    its own."""
    attention: dict[int, DecodeConfig] = field(default_factory=dict)
    """By the rows of a decode."""


@dataclass(frozen=True, slots=True)
class KernelConfigs:
    """Choice of every configuration that depends on the device."""

    device: DeviceLimits
    tuned: Tuned = field(default_factory=Tuned)

    @classmethod
    def on(cls, device: torch.device) -> KernelConfigs:
        """Those that fit a device of this machine."""
        return cls(limits_of(device))

    def streams(self, rows: int, weight: Weight) -> bool:
        """True if `kernels.gpu.linear.skinny` takes the product of so many rows."""
        outputs, inputs = weight.shape
        kind = weight_kind(weight)
        if (key := (kind, outputs, inputs, rows)) in self.tuned.products:
            return self.tuned.products[key] is not None
        return rows <= most_rows(outputs, inputs, kind, self.device)

    def product(self, rows: int, weight: Weight, *, swiglu: bool) -> SkinnyConfig:
        """Variant of a product that streams its weight."""
        outputs, inputs = weight.shape
        kind = weight_kind(weight)
        tuned = self.tuned.products.get((kind, outputs, inputs, rows))
        return tuned or choose(rows, outputs, inputs, kind, swiglu, self.device)

    def decode(self, kv: KvPages, batch: int) -> DecodeConfig:
        """Configuration of attention in a decode of so many rows."""
        return self.tuned.attention.get(batch) or decode_config(kv, batch, self.device)
