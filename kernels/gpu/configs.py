"""Configurations of the kernels that serving launches, by the device's limits or as tuned on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kernels.gpu.attention.decode import DecodeConfig, decode_config
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.linear.skinny import Weight, weight_kind
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig, choose, most_rows


class Product(NamedTuple):
    """Product of some rows with a weight of one shape and storage. A named tuple, because steps that are not captured
    make one at each launch."""

    kind: Kind
    outputs: int
    inputs: int

    @classmethod
    def of(cls, weight: Weight) -> Product:
        return cls(weight_kind(weight), *weight.shape)


@dataclass(slots=True)
class Tuned:
    """Configurations that were measured on this very device. The autotuner tries one after the other by writing it
    here before it captures a step; nothing changes once requests are served."""

    products: dict[tuple[Product, int], SkinnyConfig | None] = field(default_factory=dict)
    """By the weight and the rows of x. None: the vendor's product, the rest in kernels of its own."""
    attention: dict[int, DecodeConfig] = field(default_factory=dict)
    """By the rows of a decode."""
    asked: Counter[tuple[Product, bool]] | None = None
    """Products that were asked for and whether with the activation, counted where somebody wants to know."""


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
        product = Product.of(weight)
        if (product, rows) in self.tuned.products:
            streams = self.tuned.products[product, rows] is not None
        else:
            streams = rows <= most_rows(product.outputs, product.inputs, product.kind, self.device)
        if self.tuned.asked is not None and not streams:
            self.tuned.asked[product, False] += 1
        return streams

    def product(self, rows: int, weight: Weight, *, swiglu: bool) -> SkinnyConfig:
        """Variant of a product that streams its weight."""
        product = Product.of(weight)
        if self.tuned.asked is not None:
            self.tuned.asked[product, swiglu] += 1
        return self.tuned.products.get((product, rows)) or self.table(rows, product, swiglu=swiglu)

    def table(self, rows: int, product: Product, *, swiglu: bool) -> SkinnyConfig:
        """Variant of such a product where nothing was tuned."""
        return choose(rows, product.outputs, product.inputs, product.kind, swiglu, self.device)

    @contextmanager
    def asked(self) -> Iterator[Counter[tuple[Product, bool]]]:
        """Counts the products that are asked for inside, and whether with the activation."""
        found: Counter[tuple[Product, bool]] = Counter()
        self.tuned.asked = found
        try:
            yield found
        finally:
            self.tuned.asked = None

    def decode(self, kv: KvPages, batch: int) -> DecodeConfig:
        """Configuration of attention in a decode of so many rows."""
        return self.tuned.attention.get(batch) or decode_config(kv, batch, self.device)
