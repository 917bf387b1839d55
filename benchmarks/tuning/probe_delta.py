"""Limits that keep the delta rule's step from the speed of memory: `python -m benchmarks.tuning.probe_delta`.

Kernels that only read the same states as `kernels.gpu.delta.step`, or multiply them in place, in blocks of some
keys; the step itself that writes states back in every step or lets writes wait (`kernels.gpu.delta.waiting_writes`), by
how much of a state a program holds at once. Beside torch's mul_ of as many bytes, and its copy. Microseconds a launch
inside a CUDA graph, over more states than L2 holds.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.recorder import Recorder, describe
from kernels.gpu.delta.step import gated_delta_step
from kernels.gpu.delta.waiting_writes import WaitingWrites
from tests.kernels.gpu.delta.support import mixer

_KEY_HEADS, _DIM = 16, 128
_SLOTS = 520


@triton.jit
def _pass_kernel(
    state,
    slots,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    HINT: tl.constexpr,
    WRITE: tl.constexpr,
):
    """KEYS of a head's [DIM, DIM] at a time; a program a head. Reads and sums, or multiplies in place."""
    head = tl.program_id(0) % HEADS
    slot = tl.load(slots + tl.program_id(0) // HEADS).to(tl.int64)
    i = tl.arange(0, KEYS)[:, None]
    j = tl.arange(0, DIM)[None, :]
    total = tl.zeros([KEYS, DIM], tl.float32)
    for part in tl.static_range(DIM // KEYS):
        place = state + ((slot * HEADS + head) * DIM + part * KEYS + i) * DIM + j
        s = tl.load(place, eviction_policy=HINT)
        if WRITE:
            tl.store(place, s * 0.999, eviction_policy=HINT)
        else:
            total += s
    if not WRITE:
        tl.store(out + tl.program_id(0).to(tl.int64) * DIM + tl.arange(0, DIM), tl.sum(total, axis=0))


@dataclass(frozen=True, slots=True)
class Cut:
    """A variant of the kernel above."""

    keys: int
    warps: int
    write: bool
    hint: str = "evict_first"

    @property
    def text(self) -> str:
        return f"{'factor' if self.write else 'read'}, {self.keys} keys, {self.warps} warps, hint {self.hint or '-'}"

    def launch(self, state: Tensor, slots: Tensor, out: Tensor) -> None:
        heads = state.shape[1]
        _pass_kernel[(len(slots) * heads,)](
            state, slots, out, HEADS=heads, DIM=_DIM, KEYS=self.keys, HINT=self.hint, WRITE=self.write,
            num_warps=self.warps,
        )  # fmt: skip


def _cuts() -> Iterator[Cut]:
    for write, keys, warps in product((False, True), (128, 32, 16), (2, 4)):
        yield Cut(keys, warps, write)
    yield Cut(128, 4, False, "")


_PARTS = (64, 32, 16, 8)
"""Keys at a time of the step whose writes wait."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--heads", type=int, default=32, help="value heads: 32 as the 4B shape has, 16 as the 0.8B")
    parser.add_argument("--room", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recorder = Recorder(options.out)
    device = torch.device("cuda")
    heads = options.heads
    row_bytes = 4 * heads * _DIM * _DIM
    state = torch.randn(_SLOTS, heads, _DIM, _DIM, device=device)
    shape = {"key_heads": _KEY_HEADS, "heads": heads, "key_dim": _DIM, "value_dim": _DIM}
    m = mixer(max(options.rows), device, **shape, dtype=torch.bfloat16)
    mixed = m.projected[:, : m.conv_dim].contiguous()
    sums = torch.empty(max(options.rows) * heads, _DIM, device=device)
    for rows in options.rows:
        order = torch.randperm(_SLOTS - 1, device=device).int() + 1
        turns = [order[begin : begin + rows] for begin in range(0, _SLOTS - rows, rows)][:64]

        def report(what: str, launches: list[Callable[[], object]], passes: float, rows: int = rows) -> None:
            try:
                us = min(graph_times(launches * max(1, 16 // len(launches))))
            except Exception as error:  # one that does not compile must not end the others
                recorder.add({"rows": rows, "what": what, "failed": describe(error)})
                return
            rate = passes * rows * row_bytes / us / 1e6
            recorder.add({"rows": rows, "what": what, "us": round(us, 2), "TB/s": round(rate, 3)})
            print(f"{rows:4} {what:60} {us:8.2f} us {rate:6.3f} TB/s", flush=True)

        blocks = [state[begin : begin + rows] for begin in range(0, _SLOTS - rows, rows)][:64]
        report("torch mul_", [partial(block.mul_, 0.999) for block in blocks], 2)
        for cut in _cuts():
            report(cut.text, [partial(cut.launch, state, turn, sums) for turn in turns], 2 if cut.write else 1)
        for room, part in ((0, 0), *product(options.room, (0, *_PARTS))):
            waiting = None
            if room:
                waiting = WaitingWrites.allocate(
                    _SLOTS, heads=heads, key_dim=_DIM, value_dim=_DIM, room=room, dtype=torch.bfloat16, device=device
                )
                waiting.clear()
            inputs = (mixed[:rows], m.projected[:rows], *m.parameters(), state)
            step = partial(gated_delta_step, *inputs, waiting=waiting, late=part > 0, part=part)
            report(
                f"step, {room} may wait, {f'{part} keys at once' if part else 'written back'}",
                [partial(step, turn) for turn in turns],
                1 + 1 / (room if part else 1),
            )


if __name__ == "__main__":
    main()
