"""Pages, a clock and checks against float64 for benchmarks.tuning.attention.sweep."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again
from benchmarks.lib.recorder import describe as describe_error
from kernels.gpu.attention.decode import DecodeConfig, DecodeWorkspace, paged_decode
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.attention.prefill import PrefillConfig, paged_prefill
from kernels.gpu.launch.device import named
from kernels.gpu.segments import Segments

HEADS, KV_HEADS, DIM, PAGE = 16, 4, 256, 16
WIDTH = 2 * (HEADS + KV_HEADS) * DIM
POOL_TOKENS = 1_100_000
DEVICE = named("sm90")
"""The card whose choices are compared."""
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
_BF16 = torch.bfloat16


class Bench:
    """Pools of random pages on the GPU, and what is done with them."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self.recorder, self._clock = recorder, clock
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        self.first: dict[tuple[torch.dtype, int], Tensor] = {}
        blocks = POOL_TOKENS // PAGE
        self.pools = {dtype: self._pool(blocks, dtype) for dtype in DTYPES}
        self.order = (1 + torch.randperm(blocks - 1, device=self.device)).int()

    def _pool(self, blocks: int, dtype: torch.dtype) -> KvPages:
        kv = KvPages.allocate(blocks, PAGE, KV_HEADS, DIM, dtype, self.device)
        for pages in (kv.keys, kv.values):
            part = torch.randn(997, PAGE, KV_HEADS, DIM, device=self.device)
            if dtype == torch.float8_e4m3fn:
                part = (part * 100).clamp(-448, 448)
            raw = part.to(dtype).view(torch.uint8)
            target = pages.view(torch.uint8)
            for begin in range(0, blocks, 997):
                count = min(997, blocks - begin)
                target[begin : begin + count] = raw[:count]
        for scales in (kv.key_scales, kv.value_scales):
            if scales is not None:
                scales.uniform_(0.005, 0.015)
        return kv

    def tables(self, contexts: Sequence[int], copies: int) -> Tensor:
        """Block tables of ``copies`` disjoint sets of sequences (as far as the pool goes), row 0 zeros."""
        counts = [-(-context // PAGE) for context in contexts] * copies
        tables = torch.zeros(1 + len(counts), max(counts), dtype=torch.int32, device=self.device)
        at = 0
        for row, count in enumerate(counts, start=1):
            if at + count > len(self.order):
                at = 0
            tables[row, :count] = self.order[at : at + count]
            at += count
        return tables

    def measure(
        self,
        kernel: str,
        case: str,
        pages: str,
        config: str,
        in_use: bool,
        launches: Callable[[], Sequence[Callable[[], object]]],
        amount: float,
    ) -> None:
        """Records a row: microseconds and TB/s or TFLOP/s, or why it failed. Nothing once the time is over.

        Args:
            launches: makes what is timed.
            amount: bytes, or FLOP of prefill.
        """
        row: dict[str, Any] = {"kernel": kernel, "case": case, "pages": pages, "config": config, "in_use": in_use}
        if self._clock.over or self.recorder.done(row):
            return
        try:
            taken = statistics.median(graph_times(launches()))
            row |= {"us": round(taken, 2), "rate": round(amount / taken / 1e6, 3)}
        except Exception as error:  # one variant that does not run must not end the sweep
            row["failed"] = describe_error(error)
        self.recorder.add(row)
        if "failed" in row:
            carry_on_or_start_again("benchmarks.tuning.attention.sweep")

    def check(self, what: str, run: Callable[[], tuple[float, bool]]) -> None:
        """Records a row: the relative error against float64, and whether the bits repeat."""
        if self.recorder.done({"check": what}):
            return
        row: dict[str, Any] = {"check": what}
        try:
            error, same = run()
            row |= {"relative_error": error, "repeats": same}
            flag = "" if error < 6e-3 and same else "   <-- WRONG"
            print(f"{what:<60} relative error {error:.2e}  same bits again {same}{flag}", flush=True)
        except Exception as failure:  # as above
            row["failed"] = describe_error(failure)
            print(f"{what:<60} FAILED {row['failed']}", flush=True)
        self.recorder.add(row)
        if "failed" in row:
            carry_on_or_start_again("benchmarks.tuning.attention.sweep")


def name_of(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.float8_e4m3fn else "bf16"


def token_bytes(dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token of one layer."""
    return KvPages.bytes_per_block(1, KV_HEADS, DIM, dtype)


def exact(bench: Bench, q: Tensor, gate: Tensor, kv: KvPages, table: Tensor, start: int) -> Tensor:
    """Attention of rows [T, heads, dim] at positions start … in float64."""
    context = start + len(q)
    blocks = table[: -(-context // PAGE)].long()
    parts = KvPages(
        kv.keys.view(torch.uint8)[blocks].view(kv.keys.dtype),
        kv.values.view(torch.uint8)[blocks].view(kv.values.dtype),
        None if kv.key_scales is None else kv.key_scales[blocks],
        None if kv.value_scales is None else kv.value_scales[blocks],
    ).dense()
    keys, values = (x.double().view(-1, KV_HEADS, DIM)[:context] for x in parts)
    hidden = torch.arange(context, device=bench.device) > start + torch.arange(len(q), device=bench.device)[:, None]
    out = []
    for head in range(HEADS):
        kv_head = head * KV_HEADS // HEADS
        scores = q[:, head].double() @ keys[:, kv_head].T * DIM**-0.5
        out.append(torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ values[:, kv_head])
    return torch.cat(out, -1) * torch.sigmoid(gate.double())


def check_decode(bench: Bench, dtype: torch.dtype, config: DecodeConfig, splits: int) -> tuple[float, bool]:
    contexts = [1, 15, 63, 64, 600, 4200, 9001]
    kv, tables = bench.pools[dtype], bench.tables(contexts, 1)
    q = torch.randn(len(contexts), HEADS, DIM, device=bench.device, dtype=_BF16)
    projected = torch.randn(len(contexts), WIDTH, device=bench.device, dtype=_BF16)
    slots = torch.arange(1, len(contexts) + 1, dtype=torch.int32, device=bench.device)
    positions = torch.tensor(contexts, dtype=torch.int32, device=bench.device) - 1
    run = (q, projected, kv, tables, slots, positions, splits)
    workspace = DecodeWorkspace.allocate(len(contexts), HEADS, KV_HEADS, splits, DIM, bench.device)
    out = paged_decode(*run, config=config, workspace=workspace)
    worst = 0.0
    for row, context in enumerate(contexts):
        gate = projected[row : row + 1, : HEADS * DIM]
        expected = exact(bench, q[row : row + 1], gate, kv, tables[row + 1], context - 1)
        worst = max(worst, relative(out[row : row + 1], expected))
    same = all(torch.equal(paged_decode(*run, config=config, workspace=workspace), out) for _ in range(20))
    return worst, same


def check_prefill(bench: Bench, dtype: torch.dtype, config: PrefillConfig) -> tuple[float, bool]:
    torch.manual_seed(1)
    lengths, starts = [129, 300, 1], [1000, 0, 77]
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    kv, tables = bench.pools[dtype], bench.tables(contexts, 1)
    q = torch.randn(sum(lengths), HEADS, DIM, device=bench.device, dtype=_BF16)
    projected = torch.randn(sum(lengths), WIDTH, device=bench.device, dtype=_BF16)
    segments = Segments.build(lengths, starts, [1, 2, 3], [0] * 3, bench.device, max_segments=5, max_tiles=16)
    out = paged_prefill(q, projected, kv, tables, segments, config=config)
    worst, begin = 0.0, 0
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        run = slice(begin, begin + length)
        expected = exact(bench, q[run], projected[run, : HEADS * DIM], kv, tables[row + 1], start)
        worst = max(worst, relative(out[run], expected))
        begin += length
    same = torch.equal(paged_prefill(q, projected, kv, tables, segments, config=config), out)
    # A batch-invariant engine may choose by batch only among configurations that give the same bits.
    first = bench.first.setdefault((dtype, config.block_keys), out)
    print(f"    bits of the first configuration with as many keys a step: {torch.equal(first, out)}")
    return worst, same


def relative(got: Tensor, expected: Tensor) -> float:
    error = float((got.double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def describe(config: DecodeConfig | PrefillConfig) -> str:
    return " ".join(f"{key}={value}" for key, value in asdict(config).items())
