"""Times cuts of the training attention's backward at the 4B shape, and checks each against float64 first.

``python -m benchmarks.tuning.attention.backward [--out FILE] [--lengths 8192,32768]`` prints a line a cut and length:
the kernel's microseconds (of the queries', the keys', the values', or the keys' and values' together) and the rate of
the products that it computes. ``sum`` lines are the fastest set of kernels with values apart and together.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.precompile import precompile
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe
from benchmarks.tuning.attention.cases import DIM, HEADS, KV_HEADS, relative
from kernels.gpu.launch.device import limits_of
from kernels.gpu.train.attention import AttentionCut, AttentionShape, attention_forward
from kernels.gpu.train.attention_backward import BackwardCuts, attention_backward, backward_cuts, gate_backward
from kernels.gpu.train.documents import Documents

_BF16 = torch.bfloat16
_SHAPE = AttentionShape(HEADS, KV_HEADS, DIM)
_WIDTH = _SHAPE.value_offset + KV_HEADS * DIM
_CHECKED = [129, 64, 1, 300]
_BAR = 1e-2
"""As tests/kernels/gpu/train/test_attention.py has it."""

Part = Literal["together", "keys", "values", "queries"]
PRODUCTS: dict[Part, int] = {"together": 4, "keys": 3, "values": 2, "queries": 3}
"""Products of a pair of a token and one that it attends to, each of 2·head_dim operations a head."""
CUTS: dict[Part, list[AttentionCut]] = {
    "together": [AttentionCut(32, 64, 8, 2), AttentionCut(64, 64, 8, 2), AttentionCut(32, 64, 8, 3)],
    "keys": [
        AttentionCut(64, 128, 8, 1),
        AttentionCut(32, 128, 8, 2),
        AttentionCut(32, 128, 8, 3),
        AttentionCut(32, 64, 4, 2),
        AttentionCut(32, 64, 4, 1),
    ],
    "values": [
        AttentionCut(64, 128, 8, 2),
        AttentionCut(32, 128, 8, 3),
        AttentionCut(64, 64, 4, 2),
        AttentionCut(32, 64, 4, 2),
    ],
    "queries": [AttentionCut(128, 32, 8, 2), AttentionCut(128, 64, 8, 1), AttentionCut(64, 64, 4, 2)],
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that the backward reads, of random numbers."""

    rotated: Tensor
    projected: Tensor
    grad: Tensor
    normalizer: Tensor
    products: Tensor
    documents: Documents

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Inputs:
        """Inputs of documents of these lengths."""
        count = sum(lengths)
        generator = torch.Generator(device).manual_seed(1)
        draw = partial(torch.randn, generator=generator, device=device, dtype=_BF16)
        rotated, projected = draw(count, HEADS + KV_HEADS, DIM), draw(count, _WIDTH)
        documents = Documents.build(lengths, device)
        out, _, normalizer = attention_forward(rotated, projected, _SHAPE, documents)
        grad, _, products = gate_backward(
            out, projected, draw(count, _SHAPE.query_size), _SHAPE, projected_grad=torch.empty_like(projected)
        )
        return cls(rotated, projected, grad, normalizer, products, documents)

    def run(self, cuts: BackwardCuts) -> tuple[Tensor, Tensor]:
        """Gradients of queries and keys [T, heads + kv_heads, head_dim], and of values [T, kv_heads · head_dim]."""
        projected_grad = torch.zeros_like(self.projected)
        found = attention_backward(
            self.rotated,
            self.projected,
            self.grad,
            self.normalizer,
            self.products,
            _SHAPE,
            self.documents,
            projected_grad=projected_grad,
            cuts=cuts,
        )
        return found, _SHAPE.values(projected_grad)


def exact(inputs: Inputs, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The same gradients in float64."""
    rotated = inputs.rotated.double().requires_grad_()
    values = _SHAPE.values(inputs.projected).double().requires_grad_()
    parts, begin = [], 0
    for length in lengths:
        rows = slice(begin, begin + length)
        hidden = torch.ones(length, length, dtype=torch.bool, device=rotated.device).triu(1)
        v = values[rows].view(length, KV_HEADS, DIM)
        for head in range(HEADS):
            kv_head = head // _SHAPE.group
            scores = rotated[rows, head] @ rotated[rows, HEADS + kv_head].T * DIM**-0.5
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
            grad = inputs.grad[rows].view(length, HEADS, DIM)[:, head].double()
            parts.append(((weights @ v[:, kv_head]) * grad).sum())
        begin += length
    left, right = torch.autograd.grad(torch.stack(parts).sum(), (rotated, values))
    return left, right


def used(part: Part, cut: AttentionCut, usual: BackwardCuts) -> BackwardCuts:
    """Cuts of a backward one kernel of which has this cut."""
    apart = usual.values or CUTS["values"][0]
    match part:
        case "together":
            return BackwardCuts(cut, usual.queries)
        case "keys":
            return BackwardCuts(cut, usual.queries, apart)
        case "values":
            return BackwardCuts(CUTS["keys"][0], usual.queries, cut)
        case "queries":
            return BackwardCuts(usual.keys, cut, usual.values)


def variants(usual: BackwardCuts) -> Iterator[tuple[Part, AttentionCut, BackwardCuts]]:
    """Every cut of every kernel."""
    for part, cuts in CUTS.items():
        for cut in cuts:
            yield part, cut, used(part, cut, usual)


class Sweep:
    """Cuts of all kernels, as far as the time goes."""

    def __init__(self, recorder: Recorder, clock: Clock, device: torch.device) -> None:
        self._recorder, self._clock, self._device = recorder, clock, device
        self._usual = backward_cuts(_BF16, limits_of(device))

    def check(self) -> None:
        """Relative errors against float64, and whether the bits repeat."""
        inputs = Inputs.of(_CHECKED, self._device)
        wanted = exact(inputs, _CHECKED)
        for part, cut, cuts in variants(self._usual):
            key = {"check": part, **asdict(cut)}
            if self._recorder.done(key):
                continue
            try:
                found = inputs.run(cuts)
                error = max(relative(*both) for both in zip(found, wanted, strict=True))
                same = all(torch.equal(*both) for both in zip(found, inputs.run(cuts), strict=True))
                row = key | {"relative_error": error, "repeats": same, "right": error <= _BAR and same}
            except Exception as failure:  # one variant that does not run must not end the sweep
                row = key | {"failed": describe(failure)}
            self._add(row)

    def time(self, length: int) -> None:
        """Microseconds of each kernel for one document of this length: what its backward takes more than another one's
        without it cannot be told, so each is timed as it runs, alone, by the profiler."""
        inputs = Inputs.of([length], self._device)
        pairs = length * (length + 1) / 2
        best: dict[Part, float] = {}
        for part, cut, cuts in variants(self._usual):
            key = {"length": length, "part": part, **asdict(cut)}
            if self._clock.over or self._recorder.done(key):
                continue
            try:
                spent = _kernels(inputs, cuts, part)
                rate = pairs * PRODUCTS[part] * 2 * DIM * HEADS / spent / 1e6
                best[part] = min(best.get(part, float("inf")), spent)
                row = key | {"us": round(spent, 1), "tflops": round(rate, 1)}
            except Exception as failure:  # as above
                row = key | {"failed": describe(failure)}
            self._add(row)
        if best.keys() == PRODUCTS.keys():
            together, apart = best["together"] + best["queries"], best["keys"] + best["values"] + best["queries"]
            self._add({"length": length, "part": "sum", "together_us": round(together), "apart_us": round(apart)})
        whole = statistics.median(graph_times([partial(inputs.run, self._usual)]))
        self._add({"length": length, "part": "in use", "us": round(whole, 1)})

    def _add(self, row: dict[str, Any]) -> None:
        print(row, flush=True)
        self._recorder.add(row)
        if "failed" in row:
            carry_on_or_start_again("benchmarks.tuning.attention.backward")


def _kernels(inputs: Inputs, cuts: BackwardCuts, part: Part, repeats: int = 5) -> float:
    """Median microseconds of the part's kernel."""
    inputs.run(cuts)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            inputs.run(cuts)
        torch.cuda.synchronize()
    name = "_queries_kernel" if part == "queries" else "_keys_kernel"
    events = [event for event in profile.events() or () if event.name.startswith(name)]
    spent = [event.device_time for event in sorted(events, key=lambda event: event.time_range.start)]
    if part in ("keys", "values"):  # launched in this order
        spent = spent[part == "values" :: 2]
    if len(spent) != repeats:
        raise RuntimeError(f"{len(spent)} launches of {name} in {repeats} backwards")
    return float(statistics.median(spent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lengths", default="8192,32768", help="of the one document")
    parser.add_argument("--seconds", type=float, default=120.0, help="most time to spend on the device")
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    first = BackwardCuts(CUTS["keys"][0], CUTS["queries"][0], CUTS["values"][0])
    compiled = precompile(
        [lambda device, cuts=cuts: Inputs.of([64], device).run(cuts) for _, _, cuts in variants(first)]  # type: ignore[misc]
    )
    print(f"compiled in {compiled:.1f} s", flush=True)
    sweep = Sweep(Recorder(options.out, resume=options.resume), Clock(options.seconds), torch.device("cuda"))
    sweep.check()
    for length in lengths:
        sweep.time(length)


if __name__ == "__main__":
    main()
