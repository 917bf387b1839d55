"""Variants that benchmarks.tuning.step.sweep times: a decode step as it is, without parts of it, and with products cut
up otherwise."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.kernels.launches import compiled_alone, counted, held_back, launches, no_products, ordinary, without
from benchmarks.tuning.step.decode_step import MATRICES, DecodeStep
from kernels.gpu.attention.decode import DecodeConfig
from kernels.gpu.linear.skinny_configs import SkinnyConfig

_ALL = MATRICES[:-1]
PRODUCTS = ("tma_kernel", "vector_kernel", "stream_kernel", "dot_kernel", "int4_vector_kernel", "_fp8_linear_kernel")
_PREFETCHES = (0, 512, 1024, 2048)
"""Bytes of each row of a weight that the tma and dot variants ask for ahead; the others: tiles."""
_CUTS: tuple[tuple[str, tuple[int, ...], tuple[Any, ...]], ...] = (
    # Matrix, numbers of rows, arguments of SkinnyConfig; bf16. Those of sweep_focus.py that are close to the best.
    ("gate_up", (8, 16, 64), ("tma", 128, 64, 4, 3)),
    ("gate_up", (8, 16, 64), ("tma", 128, 64, 4, 5)),
    ("gate_up", (8, 16, 64), ("tma", 128, 128, 4, 2)),
    ("gate_up", (8, 16), ("tma", 128, 64, 4, 4, 2)),
    ("down", (8, 16, 64), ("tma", 64, 128, 4, 5, 6)),
    ("down", (8, 16), ("tma", 64, 64, 4, 8, 3)),
    ("in_proj", (8, 16, 64), ("tma", 64, 128, 4, 5)),
    ("in_proj", (8, 16), ("tma", 128, 64, 4, 8)),
    ("out_proj", (8, 16), ("tma", 64, 128, 4, 3, 8)),
    ("out_proj", (16, 64), ("tma", 64, 64, 4, 8, 3)),
    *((name, (8, 16), ("stream", 16, *rest)) for name in _ALL for rest in ((512, 4, 2), (256, 4, 4))),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One figure: the step with something changed."""

    what: str
    rows: int
    adapters: bool
    urgency: int
    """Lower comes first."""
    skipped: tuple[str, ...] = ()
    """Kernels."""
    left_out: frozenset[str] = frozenset()
    """Names in MATRICES that are left out."""
    pdl: bool = True
    ordinary: frozenset[str] = frozenset()
    """Kernels and MATRICES whose launches wait for the end of the kernel ahead."""
    alone: frozenset[str] = frozenset()
    """Kernels that are compiled without programmatic launch."""
    held: frozenset[str] = frozenset()
    """Kernels ahead of products that hold them back if they do not else, and the reverse."""
    cut: tuple[tuple[str, SkinnyConfig | None], ...] = ()
    """Matrices and how they are cut up; None: torch's product."""
    attention: tuple[int, DecodeConfig] | None = None
    """Attention argument of DecodeStep.launch()."""
    launches: int = 0
    """Launches of a step that are skipped."""

    @property
    def key(self) -> dict[str, Any]:
        return {"what": self.what, "rows": self.rows, "adapters": self.adapters}

    def launch(self, step: DecodeStep) -> Tensor:
        with ExitStack() as stack:
            if self.skipped:
                stack.enter_context(without(*self.skipped))
            if self.ordinary:
                stack.enter_context(ordinary(lambda *launch: step.part(*launch) in self.ordinary))
            if self.alone:
                stack.enter_context(compiled_alone(lambda *launch: step.part(*launch) in self.alone))
            if self.held:
                stack.enter_context(held_back(lambda *launch: step.part(*launch) in self.held))
            for name, config in self.cut:
                stack.enter_context(step.cut(name, self.rows, config))
            return step.launch(
                self.rows, adapters=self.adapters, pdl=self.pdl, left_out=self.left_out, attention=self.attention
            )


def variants(step: DecodeStep, rows: int, adapters: bool, kernels: Counter[str]) -> Iterator[Variant]:
    """Variants that are measured beside the whole step.

    Args:
        kernels: launches of the whole step by kernel.
    """
    make = partial(Variant, rows=rows, adapters=adapters)
    yield make("no programmatic launch", urgency=1, pdl=False)
    others = tuple(name for name in sorted(kernels) if name not in PRODUCTS)
    yield make("products alone", urgency=1, skipped=others)
    yield make("no products", urgency=1, left_out=frozenset(MATRICES))
    for name in MATRICES:
        yield make(f"- {name}", urgency=1, left_out=frozenset({name}))
    for name in others:
        yield make(f"- {name}", urgency=1, skipped=(name,), launches=kernels[name])
    if step.quantization != "int4":
        yield from _prefetched(step, rows, adapters)
    if not adapters:
        yield from _other_cuts(step, rows)


def _prefetched(step: DecodeStep, rows: int, adapters: bool) -> Iterator[Variant]:
    chosen = {name: step.chosen(name, rows) for name in _ALL}
    now = {name: config for name, config in chosen.items() if config is not None}
    for prefetch in _PREFETCHES:
        cuts = tuple((name, replace(config, prefetch=prefetch)) for name, config in now.items())
        if any(config != now[name] for name, config in cuts):
            yield Variant(f"all prefetch {prefetch}", rows, adapters, urgency=2, cut=cuts)
    if adapters:
        return
    for name, config in now.items():
        for prefetch in _PREFETCHES:
            if prefetch != config.prefetch and (prefetch < 2048 or config.variant == "tma"):
                cut = ((name, replace(config, prefetch=prefetch)),)
                yield Variant(f"{name} prefetch {prefetch}", rows, False, urgency=3, cut=cut)


def _other_cuts(step: DecodeStep, rows: int) -> Iterator[Variant]:
    if rows > 64 or step.quantization != "none":
        return
    for name in _ALL:
        if rows > 1 and step.chosen(name, rows) is not None:
            yield Variant(f"{name} torch", rows, False, urgency=2, cut=((name, None),))
    for name, counts, arguments in _CUTS:
        config = SkinnyConfig(*arguments)
        if rows in counts and config != step.chosen(name, rows):
            text = " ".join(map(str, arguments))
            yield Variant(f"{name} {text}", rows, False, urgency=2, cut=((name, config),))


def plan(step: DecodeStep, options: argparse.Namespace) -> list[Variant]:
    """All of them, the whole steps first, then by urgency."""
    found: list[Variant] = []
    for with_adapters in (False, True) if options.adapters else (False,):
        for rows in options.rows:
            whole = Variant("everything", rows, with_adapters, urgency=0)
            with launches(lambda *_: False), counted() as kernels, no_products():
                whole.launch(step)
            others = variants(step, rows, with_adapters, kernels)
            found += [whole, *(variant for variant in others if re.search(options.only, variant.what))]
    return sorted(found, key=lambda variant: variant.urgency)
