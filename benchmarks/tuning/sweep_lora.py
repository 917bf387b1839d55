"""Cost of adapters in a product, and every sensible cut of their kernels, at the 4B shape:
`python -m benchmarks.tuning.sweep_lora [--parts pairs,shrink,expand] [--seconds N] --out FILE`.

8 adapters of rank 16, row i uses adapter i mod 8. "pairs": a product with all that the engine launches for it, in
bfloat16, without adapters and with them. "shrink" and "expand" fill shrink_config() and expand_config().
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.launches import no_products, one_share
from benchmarks.kernels.linear import EPS, MATRICES, make_lora, weight_bytes
from benchmarks.kernels.timing import Tensors
from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.precompile import Launch, precompile
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe
from kernels.gpu.launch.device import limits_of
from kernels.gpu.linear.skinny_configs import SkinnyConfig, choose
from kernels.gpu.lora.rows import LoraRows

PARTS = ("pairs", "shrink", "expand")
_PAIRS = ("in_delta", "gate_up", "out", "down")
_NORMED = ("in_delta", "gate_up")
_PREFETCHES = (0, 512, 1024, 2048)
_LAUNCHES = 24
"""Fewest launches in a graph."""
_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure."""

    part: str
    name: str
    """Name in MATRICES."""
    rows: int
    adapters: bool = True
    cut: tuple[Any, ...] = ()
    """Arguments of ShrinkConfig or ExpandConfig."""
    config: SkinnyConfig | None = None
    """Variant of a pair; None: a kernel for each of norm, product, adapters and activation."""

    def key(self) -> dict[str, Any]:
        key: dict[str, Any] = {"part": self.part, "name": self.name, "rows": self.rows, "adapters": self.adapters}
        if self.part == "pairs":
            return {**key, **({"variant": "apart"} if self.config is None else asdict(self.config))}
        return {**key, "cut": list(self.cut)}

    @property
    def label(self) -> str:
        if self.part != "pairs":
            return " ".join(map(str, self.cut))
        return "apart" if self.config is None else f"{self.config.variant} prefetch {self.config.prefetch}"


def entries(parts: tuple[str, ...]) -> Iterator[Entry]:
    """The most important first."""
    if "pairs" in parts:
        for rows in (8, 1, 64, 16):
            for name in _PAIRS:
                n, k, _ = MATRICES[name]
                chosen = choose(rows, n, k, "none", name == "gate_up", limits_of(torch.device("cuda")))
                configs: list[SkinnyConfig | None] = [chosen]
                if chosen.variant in ("tma", "dot"):
                    configs += [replace(chosen, prefetch=bytes_) for bytes_ in _PREFETCHES if bytes_ != chosen.prefetch]
                    configs.append(replace(chosen, slots=1))
                if rows == 64:
                    configs.append(None)
                for config in configs:
                    yield Entry("pairs", name, rows, adapters=False, config=config)
                    yield Entry("pairs", name, rows, config=config)
    for name in ("in_delta", "down", "out"):
        _, depth, ends = MATRICES[name]
        for rows in (1, 8, 16, 64, 256, 8192):
            if "shrink" in parts:
                yield from (Entry("shrink", name, rows, cut=cut) for cut in _shrink_cuts(rows, depth, 16 * len(ends)))
            if "expand" in parts and rows >= 64:
                yield from (Entry("expand", name, rows, cut=cut) for cut in _expand_cuts(rows))


def _shrink_cuts(rows: int, depth: int, pairs: int) -> Iterator[tuple[int, ...]]:
    """Arguments of ShrinkConfig, up to 8, the likeliest first."""
    if rows <= 16:
        splits = -(-depth // 4096)
        block_k = 1 << (-(-depth // splits) - 1).bit_length()
        for block_r, warps in ((2, 4), (1, 4), (4, 8)):
            yield 1, block_r, block_k, splits, warps, 1
    if rows <= 256:
        parts = min(4, -(-depth // 1280))
        block_m = 8 if rows <= 64 else 16
        yield block_m, 16, 256, parts, 8, 1, True
        yield block_m, 16, 128, 2 * parts, 4, 1, True
        yield block_m, 16, 256, 2 * parts, 8, 1, True
        yield 2 * block_m, 16, 256, 2 * parts, 8, 1, True
        if rows > 16:
            yield block_m, 32, 256, 2 * parts, 8, 1, True
    if rows > 16:
        block_m = min(64, 1 << (rows - 1).bit_length())
        for splits, block_r, block_k, stages in ((2, 16, 128, 4), (4, min(64, pairs), 64, 3), (1, 64, 64, 3)):
            for parts in (splits,) if rows <= 256 else (1, 2, 4):
                yield block_m, block_r, block_k, parts, 4, stages


def _expand_cuts(rows: int) -> Iterator[tuple[int, ...]]:
    """Arguments of ExpandConfig."""
    for block_m in (64, 128):
        if block_m <= rows:
            for block_n in (64, 128, 256):
                for warps in (4, 8):
                    for slots in (8,) if rows <= 64 else (1, 2):
                        yield block_m, block_n, warps, slots


def launches(t: Tensors, entry: Entry) -> list[Callable[[], object]]:
    """Launches of the same work on different memory, more than L2 holds, as the engine launches it."""
    return {"pairs": _pairs, "shrink": _shrinks, "expand": _expands}[entry.part](t, entry)


def _pairs(t: Tensors, entry: Entry) -> list[Callable[[], object]]:
    from kernels.gpu.linear.products import finished, normed
    from kernels.gpu.linear.skinny import Norm, Scaled, SplitWorkspace, skinny_add, skinny_linear

    n, k, _ = MATRICES[entry.name]
    rows, swiglu, config = entry.rows, entry.name == "gate_up", entry.config
    x, stream = t.normal(rows, k), t.normal(rows, n)
    own = Norm(1 + t.normal(k, scale=0.1, dtype=torch.float32), EPS) if entry.name in _NORMED else None
    following = Norm(1 + t.normal(n, scale=0.1, dtype=torch.float32), EPS)
    # As many parts as a product of 2,560 outputs leaves.
    scaled = Scaled(x, 1 + t.zeros(1280 if rows == 1 else 40, rows, dtype=torch.float32), EPS)
    workspace = SplitWorkspace.allocate(t.device)

    def apart(weight: Tensor, lora: LoraRows | None) -> Tensor:
        inputs = normed(x, own, None, pdl=True)
        return finished(torch.mm(inputs, weight.t()), inputs, swiglu=swiglu, lora=lora, pdl=True)

    def one(weight: Tensor, lora: LoraRows | None) -> object:
        if own is None:
            return skinny_add(
                stream, x, weight, lora=lora, ahead=following, config=config, workspace=workspace, pdl=True
            )
        return skinny_linear(scaled, weight, swiglu=swiglu, lora=lora, config=config, workspace=workspace, pdl=True)

    found: list[Callable[[], object]] = []
    for _ in range(t.copies(weight_bytes(n, k, "none"))):
        weight = t.normal(n, k, scale=k**-0.5)
        lora = make_lora(t, entry.name, rows) if entry.adapters else None
        found.append(partial(apart if config is None else one, weight, lora))
    return found


def _shrinks(t: Tensors, entry: Entry) -> list[Callable[[], object]]:
    from kernels.gpu.linear.preparation import shrink
    from kernels.gpu.lora.shrink import ShrinkConfig

    x = t.normal(entry.rows, MATRICES[entry.name][1])
    first = make_lora(t, entry.name, entry.rows)
    loras = [first] + [make_lora(t, entry.name, entry.rows) for _ in range(t.copies(first.a.nbytes) - 1)]
    config = ShrinkConfig(*entry.cut)
    return [partial(shrink, x, lora, config=config, pdl=entry.rows <= 64) for lora in loras]


def _expands(t: Tensors, entry: Entry) -> list[Callable[[], object]]:
    from kernels.gpu.lora.expand import ExpandConfig, expand_add

    n, _, ends = MATRICES[entry.name]
    h = t.normal(1, entry.rows, len(ends) * 16, dtype=torch.float32)
    outs = [t.zeros(entry.rows, n) for _ in range(t.copies(2 * entry.rows * n, most=4))]
    lora, config = make_lora(t, entry.name, entry.rows), ExpandConfig(*entry.cut)
    return [partial(expand_add, h, lora, out, config=config, pdl=entry.rows <= 64) for out in outs]


def _compile(chosen: list[Entry], share: int, device: torch.device) -> None:
    with one_share(share, _PROCESSES), no_products():
        for entry in chosen:
            try:
                launches(Tensors(device), entry)[0]()
            except Exception as error:  # what does not compile must not keep the others from compiling
                print(f"{entry.part} {entry.name} {entry.rows} {entry.label}: {describe(error)}", flush=True)


def report(rows: list[dict[str, Any]]) -> None:
    """Prints the pairs, and the four best cuts of each other kernel."""
    best: dict[tuple[str, str, int], list[tuple[float, str]]] = defaultdict(list)
    pairs: dict[tuple[str, int, str], dict[bool, float]] = defaultdict(dict)
    for row in rows:
        if "us" not in row:
            continue
        if row["part"] == "pairs":
            what = row["variant"] + (f" prefetch {row['prefetch']} slots {row['slots']}" if "prefetch" in row else "")
            pairs[(row["name"], row["rows"], what)][row["adapters"]] = row["us"]
        else:
            best[(row["part"], row["name"], row["rows"])].append((row["us"], " ".join(map(str, row["cut"]))))
    for (name, count, what), us in sorted(pairs.items()):
        if len(us) == 2:
            print(f"{name:9} rows {count:3} {what:28} {us[False]:7.2f} {us[True]:7.2f} us  +{us[True] - us[False]:.2f}")
    for key, found in best.items():
        print(*key, "  ".join(f"[{cut}] {us:.2f}" for us, cut in sorted(found)[:4]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="pairs,shrink,expand")
    parser.add_argument("--seconds", type=float, default=120.0, help="measure for so long at most, after compiling")
    parser.add_argument("--out", type=Path, required=True, help="file of the result, written after each figure")
    parser.add_argument("--resume", action="store_true", help="go on with what the file has")
    options = parser.parse_args()
    chosen = list(entries(tuple(options.parts.split(","))))
    shares: list[Launch] = [partial(_compile, chosen, share) for share in range(_PROCESSES)]
    print(f"{len(chosen)} figures, compiled in {precompile(shares):.0f} s", flush=True)
    recorder, clock = Recorder(options.out, resume=options.resume), Clock(options.seconds)
    t = Tensors(torch.device("cuda"))
    for entry in chosen:
        if clock.over:
            print("out of time", flush=True)
            break
        if recorder.done(entry.key()):
            continue
        row = entry.key()
        try:
            made = launches(t, entry)
            row["us"] = round(min(graph_times(made * -(-_LAUNCHES // len(made)))), 2)
        except Exception as error:  # one cut that does not fit must not end the sweep
            row["failed"] = describe(error)
        recorder.add(row)
        if "failed" in row:
            carry_on_or_start_again("benchmarks.tuning.sweep_lora")
    report(recorder.rows)


if __name__ == "__main__":
    main()
