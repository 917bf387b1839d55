"""What keeps the delta rule's step from the speed of a multiplication in place: `python -m benchmarks.probe_delta`.

Kernels that read and write the same states as `kernels.gpu.gated_delta_step` but do less, or in other pieces: a factor
alone, in blocks of whole rows or of columns; a factor and sums over keys; the step itself, whole and with programs that
share a head by its value dimensions, of which the last to arrive norms the output of all. Beside torch's mul_ of as
many bytes, and its copy. Microseconds a launch inside a CUDA graph, over more states than L2 holds.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.graph_timing import graph_times
from benchmarks.recorder import Recorder, describe
from kernels.gpu.delta_shape import DeltaShape
from kernels.gpu.gated_delta_step import Mixer, advance, gated_delta_step, launch_parts, store_normed
from tests.kernels.gpu.delta_support import mixer

_KEY_HEADS, _HEADS, _DIM = 16, 32, 128
_SLOTS = 520
_ROW_BYTES = 2 * 4 * _HEADS * _DIM * _DIM
"""Of a row's states, read and written."""


@triton.jit
def _factor_kernel(
    state,
    slots,
    factor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SUMS: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
):
    """[KEYS, VALUES] of a head's [DIM, DIM]; SUMS: less than all of what the step computes, but its two reductions."""
    across: tl.constexpr = DIM // VALUES
    parts: tl.constexpr = across * (DIM // KEYS)
    part = tl.program_id(0) % parts
    row = tl.program_id(0) // parts // HEADS
    head = tl.program_id(0) // parts % HEADS
    i = part // across * KEYS + tl.arange(0, KEYS)[:, None]
    j = part % across * VALUES + tl.arange(0, VALUES)[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * HEADS + head) * DIM + i) * DIM + j
    s = tl.load(place, eviction_policy=READ)
    if SUMS:
        weight = (i % 7).to(tl.float32)
        read = tl.sum(s * weight, axis=0)
        other = tl.sum(s * (weight - 1.0), axis=0)
        s = factor * s + weight * (read - other)[None, :]
    else:
        s = s * factor
    tl.store(place, s, eviction_policy=WRITE)


@triton.jit
def _shared_step_kernel(
    mixer,
    state,
    slots,
    outputs,
    counters,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    parts: tl.constexpr = DIM // VALUES
    part = tl.program_id(0) % parts
    of = tl.program_id(0) // parts
    row, head = (of // HEADS).to(tl.int64), of % HEADS
    i = tl.arange(0, DIM)[:, None]
    j = part * VALUES + tl.arange(0, VALUES)
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * HEADS + head) * DIM + i) * DIM + j[None, :]
    s = tl.load(place, eviction_policy="evict_first")
    s, o = advance(s, row, head, j, mixer, KEY_HEADS, HEADS, DIM, DIM, DIM)
    tl.store(place, s, eviction_policy="evict_first")
    tl.store(outputs + of * DIM + j, o)
    tl.debug_barrier()
    if tl.atomic_add(counters + of, 1, sem="acq_rel", scope="gpu") == parts - 1:
        every = tl.arange(0, DIM)
        whole = tl.load(outputs + of * DIM + every, cache_modifier=".cg")
        tl.store(counters + of, 0)
        store_normed(whole, row, head, every, mixer, KEY_HEADS, HEADS, DIM, DIM)


@dataclass(frozen=True, slots=True)
class SharedStep:
    """The step with ``values`` value dimensions a program."""

    mixer: Mixer
    state: Tensor
    outputs: Tensor
    """[rows, heads, dim] float32."""
    counters: Tensor
    """[rows, heads] int32, zeros."""

    def launch(self, slots: Tensor, values: int, warps: int) -> None:
        _shared_step_kernel[(len(slots) * _HEADS * (_DIM // values),)](
            self.mixer, self.state, slots, self.outputs, self.counters,
            KEY_HEADS=_KEY_HEADS, HEADS=_HEADS, DIM=_DIM, VALUES=values, num_warps=warps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """A variant of the kernel above."""

    keys: int
    values: int
    warps: int
    sums: bool = False
    read: str = "evict_first"
    write: str = "evict_first"
    registers: int | None = None

    @property
    def text(self) -> str:
        hints = f"[{self.read or '-'}, {self.write or '-'}]"
        most = f", {self.registers} registers" if self.registers else ""
        return f"{self.keys}x{self.values} {self.warps} warps{', sums' * self.sums} {hints}{most}"

    def launch(self, state: Tensor, slots: Tensor) -> None:
        parts = (_DIM // self.keys) * (_DIM // self.values)
        _factor_kernel[(len(slots) * _HEADS * parts,)](
            state, slots, 0.999, HEADS=_HEADS, DIM=_DIM, KEYS=self.keys, VALUES=self.values, SUMS=self.sums,
            READ=self.read, WRITE=self.write, num_warps=self.warps, maxnreg=self.registers,
        )  # fmt: skip


def _variants() -> Iterator[Cut]:
    for keys, values in ((128, 128), (64, 128), (32, 128), (16, 128), (128, 64), (128, 32)):
        for warps in (2, 4, 8) if keys * values < 16384 else (4, 8):
            yield Cut(keys, values, warps)
            if keys == 128:
                yield Cut(keys, values, warps, sums=True)
    for read, write in (("", ""), ("evict_first", ""), ("", "evict_first"), ("evict_first", "evict_last")):
        yield Cut(128, 128, 4, read=read, write=write)
        yield Cut(32, 128, 4, read=read, write=write)
    for registers in (128, 168):
        yield Cut(128, 64, 4, sums=True, registers=registers)
        yield Cut(128, 128, 8, sums=True, registers=registers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[64, 256])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recorder = Recorder(options.out)
    device = torch.device("cuda")
    state = torch.randn(_SLOTS, _HEADS, _DIM, _DIM, device=device)
    m = mixer(
        max(options.rows),
        device,
        key_heads=_KEY_HEADS,
        heads=_HEADS,
        key_dim=_DIM,
        value_dim=_DIM,
        kernel=4,
        dtype=torch.bfloat16,
    )
    mixed = m.projected[:, : m.conv_dim].contiguous()
    for rows in options.rows:
        order = torch.randperm(_SLOTS - 1, device=device).int() + 1
        turns = [order[begin : begin + rows] for begin in range(0, _SLOTS - rows, rows)]
        sorted_turns = [turn.sort().values for turn in turns]

        def report(what: str, launches: list[Callable[[], object]], rows: int = rows) -> None:
            try:
                us = min(graph_times(launches * max(1, 16 // len(launches))))
            except Exception as error:  # one that does not compile must not end the others
                recorder.add({"rows": rows, "what": what, "failed": describe(error)})
                return
            rate = rows * _ROW_BYTES / us / 1e6
            recorder.add({"rows": rows, "what": what, "us": round(us, 2), "TB/s": round(rate, 3)})
            print(f"{rows:4} {what:60} {us:8.2f} us {rate:6.3f} TB/s", flush=True)

        def step(slots: Tensor, rows: int = rows) -> Tensor:
            return gated_delta_step(mixed[:rows], m.projected[:rows], *m.parameters(), state, slots)

        blocks = [state[begin : begin + rows] for begin in range(0, _SLOTS - rows, rows)]
        report("torch mul_", [partial(block.mul_, 0.999) for block in blocks])
        report("torch copy_", [partial(a.copy_, b) for a, b in zip(blocks, blocks[1:] + blocks[:1], strict=True)])
        report("step", [partial(step, turn) for turn in turns])
        report("step, slots in order", [partial(step, turn) for turn in sorted_turns])
        out, expected = torch.empty(2, rows, _HEADS * _DIM, dtype=torch.bfloat16, device=device)
        here = (mixed[:rows], m.projected[:rows], *m.parameters(), out)
        shared = SharedStep(
            launch_parts(*here, DeltaShape.of(mixed, m.projected, state), False)[0],
            state,
            torch.empty(rows, _HEADS, _DIM, device=device),
            torch.zeros(rows, _HEADS, dtype=torch.int32, device=device),
        )
        for values, warps in ((64, 4), (64, 2), (32, 4), (32, 2), (32, 1)):
            before = state[turns[0].long()].clone()
            gated_delta_step(*here[:-1], state, turns[0], out=expected)
            after = state[turns[0].long()].clone()
            state[turns[0].long()] = before
            shared.launch(turns[0], values, warps)
            apart = max(float((out - expected).abs().max()), float((state[turns[0].long()] - after).abs().max()))
            report(
                f"step, {values} values a program, {warps} warps (differs by {apart:.1e})",
                [partial(shared.launch, turn, values, warps) for turn in turns],
            )
        for cut in _variants():
            report(cut.text, [partial(cut.launch, state, turn) for turn in turns])


if __name__ == "__main__":
    main()
