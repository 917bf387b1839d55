"""Times every configuration of the attention kernels at the 4B shape, and checks each against float64 first.

``python -m benchmarks.sweep_attention [--out FILE] [--quick]`` prints a line a case (the fastest configurations, the
one in use, their bandwidth or FLOP rate) and writes all rows as JSON. Launches are timed inside CUDA graphs over
enough different sequences that the cache holds none of their pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.precompile import Launch, precompile
from kernels.gpu.attention_decode import DecodeConfig, DecodeWorkspace, decode_config, decode_splits, paged_decode
from kernels.gpu.attention_prefill import PrefillConfig, paged_prefill, prefill_config
from kernels.gpu.pages import KvPages
from kernels.gpu.qk_rope import qk_norm_rope_write
from kernels.gpu.segments import Segments

HEADS, KV_HEADS, DIM, PAGE = 16, 4, 256, 16
WIDTH = 2 * (HEADS + KV_HEADS) * DIM
POOL_TOKENS = 1_100_000
PROCESSORS = 132
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
DECODE_CASES = [(batch, context) for batch in (1, 8, 16, 64, 256) for context in (600, 4200)]
DECODE_CASES += [(1, 32768), (8, 32768), (1, 131072)]
PREFILL_CASES = [(1, 512, 0), (16, 512, 0), (4, 4096, 0), (1, 16384, 0), (1, 512, 32768)]
ROPE_CASES = [1, 8, 64, 512, 8192]

_BF16 = torch.bfloat16
DECODE_CONFIGS = {
    torch.bfloat16: [(32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3)],
    torch.float8_e4m3fn: [(32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4)],
}
"""Keys, warps, stages."""
PREFILL_CONFIGS = {
    torch.bfloat16: [(128, 64, 8, 2, 1), (128, 64, 8, 2, 2), (64, 64, 4, 2, 1), (64, 64, 4, 2, 2)],
    torch.float8_e4m3fn: [(128, 32, 8, 3, 1), (128, 32, 8, 4, 1), (128, 64, 8, 2, 1), (64, 32, 4, 3, 1)],
}
"""Rows, keys, warps, stages, tail stages."""
ROPE_CONFIGS = [(0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 5, 1), (1, 10, 1)]
"""Rows and heads a program, warps; zeros: what the launcher chooses."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    kernel: str
    case: str
    pages: str
    config: str
    in_use: bool
    microseconds: float
    rate: float
    """TB/s of decode and rope, TFLOP/s of prefill."""


class Bench:
    """Pools of random pages on the GPU, and a clock."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        stream: Any = torch.cuda.Stream  # has no annotations
        self.stream = stream()
        self.memory = torch.cuda.graph_pool_handle()
        self.rows: list[Row] = []
        self.errors: list[dict[str, Any]] = []
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

    def time(self, launches: Sequence[Callable[[], object]]) -> float:
        """Microseconds a launch, the median of graph replays."""
        launches[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(
            self.stream
        ):  # torch.cuda.graph() would collect garbage each time, for a tenth of a second
            graph.capture_begin(pool=self.memory)
            for launch in launches:
                launch()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph.replay()
        times: list[float] = []
        event: Any = torch.cuda.Event  # has no annotations
        for _ in range(5):
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(launches))
        return statistics.median(times)

    def add(self, *row: Any) -> Row:
        self.rows.append(Row(*row))
        return self.rows[-1]


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


def check_decode(bench: Bench, dtype: torch.dtype, config: DecodeConfig, splits: int) -> None:
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
    report(bench, f"decode {name_of(dtype)} {describe(config)} splits {splits}", worst, same)


def check_prefill(bench: Bench, dtype: torch.dtype, config: PrefillConfig) -> None:
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
    report(bench, f"prefill {name_of(dtype)} {describe(config)}", worst, same)
    # A batch-invariant engine may choose by batch only among configurations that give the same bits.
    first = bench.first.setdefault((dtype, config.block_keys), out)
    print(f"    bits of the first configuration with as many keys a step: {torch.equal(first, out)}")


def relative(got: Tensor, expected: Tensor) -> float:
    error = float((got.double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def report(bench: Bench, what: str, error: float, same: bool) -> None:
    bench.errors.append({"what": what, "relative_error": error, "repeats": same})
    flag = "" if error < 6e-3 and same else "   <-- WRONG"
    print(f"{what:<60} relative error {error:.2e}  same bits again {same}{flag}", flush=True)


def describe(config: DecodeConfig | PrefillConfig) -> str:
    return " ".join(f"{key}={value}" for key, value in asdict(config).items())


def sweep_decode(bench: Bench, dtype: torch.dtype, batch: int, context: int, full: bool) -> None:
    kv, size = bench.pools[dtype], batch * context * token_bytes(dtype)
    copies = max(2, min(48, 400_000_000 // size))
    tables = bench.tables([context] * batch, copies)
    q = torch.randn(batch, HEADS, DIM, device=bench.device, dtype=_BF16)
    projected = torch.randn(batch, WIDTH, device=bench.device, dtype=_BF16)
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device=bench.device)
    slots = [torch.arange(batch, dtype=torch.int32, device=bench.device) + 1 + batch * i for i in range(copies)]
    out = torch.empty(batch, HEADS * DIM, device=bench.device, dtype=_BF16)

    def measure(config: DecodeConfig, splits: int, in_use: bool = False) -> Row:
        workspace = DecodeWorkspace.allocate(batch, HEADS, KV_HEADS, splits, DIM, bench.device)

        def launch(rows: Tensor) -> Callable[[], object]:
            return lambda: paged_decode(
                q, projected, kv, tables, rows, positions, splits, workspace=workspace, out=out, config=config
            )

        took = bench.time([launch(rows) for rows in slots])
        what = f"{describe(config)} launched={splits}"
        case = f"{batch} x {context}"
        return bench.add("decode", case, name_of(dtype), what, in_use, took, size / took / 1e6)

    used, launched = decode_config(kv, batch), decode_splits(batch, KV_HEADS, PROCESSORS)
    measure(used, launched, True)
    if full:
        fewest = max(1, 66 // (batch * KV_HEADS))
        for keys, warps, stages in DECODE_CONFIGS[dtype]:
            for splits in (fewest, 2 * fewest, 4 * fewest, 8 * fewest):
                # max_keys out of the way: as many splits as are asked for.
                measure(
                    DecodeConfig(keys, warps, stages, splits, min_keys=64, max_keys=1 << 30), max(4, min(64, splits))
                )
        for count in (4, 8, 32):
            measure(used, count)
    show(bench, "decode", f"{batch} x {context}", name_of(dtype), "TB/s")


def sweep_prefill(bench: Bench, dtype: torch.dtype, count: int, length: int, start: int) -> None:
    kv, tables = bench.pools[dtype], bench.tables([start + length] * count, 1)
    rows = count * length
    q = torch.randn(rows, HEADS, DIM, device=bench.device, dtype=_BF16)
    projected = torch.randn(rows, WIDTH, device=bench.device, dtype=_BF16)
    segments = Segments.build([length] * count, [start] * count, range(1, count + 1), [0] * count, bench.device)
    out = torch.empty(rows, HEADS * DIM, device=bench.device, dtype=_BF16)
    flop = 4 * HEADS * DIM * count * (length * start + length * (length + 1) / 2)
    used = prefill_config(kv)
    configs = [used, *(c for c in (PrefillConfig(*numbers) for numbers in PREFILL_CONFIGS[dtype]) if c != used)]
    case = f"{count} x {length}" + (f" after {start}" if start else "")
    for config in configs:
        took = bench.time([lambda c=config: paged_prefill(q, projected, kv, tables, segments, out=out, config=c)] * 3)  # type: ignore[misc]
        bench.add("prefill", case, name_of(dtype), describe(config), config == used, took, flop / took / 1e6)
    show(bench, "prefill", case, name_of(dtype), "TFLOP/s")


def sweep_torch(bench: Bench, count: int, length: int) -> None:
    """The same product by torch's scaled_dot_product_attention, without pages or gate."""
    q = torch.randn(count, HEADS, length, DIM, device=bench.device, dtype=_BF16)
    k, v = (torch.randn(count, HEADS, length, DIM, device=bench.device, dtype=_BF16) for _ in range(2))
    flop = 4 * HEADS * DIM * count * length * (length + 1) / 2
    attend = torch.nn.functional.scaled_dot_product_attention
    took = bench.time([lambda: attend(q, k, v, is_causal=True)] * 3)
    bench.add("prefill", f"{count} x {length}", "torch", "scaled_dot_product_attention", False, took, flop / took / 1e6)
    show(bench, "prefill", f"{count} x {length}", "torch", "TFLOP/s")


def sweep_rope(bench: Bench, dtype: torch.dtype, rows: int) -> None:
    kv, tables = bench.pools[dtype], bench.tables([rows], 1)
    copies = max(2, min(48, 400_000_000 // (rows * WIDTH * 2)))
    inputs = [torch.randn(rows, WIDTH, device=bench.device, dtype=_BF16) for _ in range(copies)]
    norm, inverse = torch.ones(HEADS + KV_HEADS, DIM, device=bench.device), torch.ones(32, device=bench.device)
    positions = torch.arange(rows, dtype=torch.int32, device=bench.device)
    slots = torch.ones(rows, dtype=torch.int32, device=bench.device)
    out = torch.empty(rows, HEADS, DIM, device=bench.device, dtype=_BF16)
    size = rows * ((HEADS + 2 * KV_HEADS) * DIM * 2 + HEADS * DIM * 2 + token_bytes(dtype))
    for tile, group, warps in ROPE_CONFIGS:
        knobs: dict[str, Any] = {"rows_a_program": tile, "heads_a_program": group, "num_warps": warps}

        def launch(x: Tensor, knobs: dict[str, Any] = knobs) -> Callable[[], object]:
            return lambda: qk_norm_rope_write(x, norm, 1e-6, inverse, positions, slots, tables, kv, out=out, **knobs)

        took = bench.time([launch(x) for x in inputs])
        what = " ".join(f"{key}={value}" for key, value in knobs.items())
        bench.add("rope", str(rows), name_of(dtype), what, tile == 0, took, size / took / 1e6)
    show(bench, "rope", str(rows), name_of(dtype), "TB/s")


def show(bench: Bench, kernel: str, case: str, pages: str, unit: str) -> None:
    rows = [row for row in bench.rows if (row.kernel, row.case, row.pages) == (kernel, case, pages)]
    rows.sort(key=lambda row: row.microseconds)
    print(f"{kernel} {case} {pages}")
    for row in [*rows[:4], *(row for row in rows[4:] if row.in_use)]:
        mark = "*" if row.in_use else " "
        print(f"  {mark} {row.microseconds:9.2f} us {row.rate:7.2f} {unit}  {row.config}", flush=True)


def all_launches() -> list[Launch]:
    """One launch a kernel variant, for precompile(): shapes decide what is compiled, so they are the real ones."""
    launches: list[Launch] = []

    def inputs(device: Any, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, KvPages, Tensor, Tensor]:
        kv = KvPages.allocate(2, PAGE, KV_HEADS, DIM, dtype, device)
        ints = torch.zeros(rows, dtype=torch.int32, device=device)
        q = torch.zeros(rows, HEADS, DIM, dtype=_BF16, device=device)
        projected = torch.zeros(rows, WIDTH, dtype=_BF16, device=device)
        return q, projected, kv, torch.zeros(2, 16, dtype=torch.int32, device=device), ints

    for dtype in DTYPES:
        for keys, warps, stages in DECODE_CONFIGS[dtype]:

            def decode(device: Any, dtype: torch.dtype = dtype, c: Any = (keys, warps, stages, 8)) -> object:
                q, projected, kv, tables, ints = inputs(device, dtype, 1)
                return paged_decode(q, projected, kv, tables, ints, ints, 8, config=DecodeConfig(*c))

            launches.append(decode)
        for batch in (1, 16, 64, 256):

            def decode_in_use(device: Any, dtype: torch.dtype = dtype, rows: int = batch) -> object:
                q, projected, kv, tables, ints = inputs(device, dtype, rows)
                return paged_decode(q, projected, kv, tables, ints, ints, 8)

            launches.append(decode_in_use)
        for numbers in PREFILL_CONFIGS[dtype]:

            def prefill(device: Any, dtype: torch.dtype = dtype, c: Any = numbers) -> object:
                q, projected, kv, tables, _ = inputs(device, dtype, 64)
                segments = Segments.build([64], [0], [1], [0], device)
                return paged_prefill(q, projected, kv, tables, segments, config=PrefillConfig(*c))

            launches.append(prefill)
        for tile, group, warps in ROPE_CONFIGS[1:]:

            def rope(device: Any, dtype: torch.dtype = dtype, c: Any = (tile, group, warps)) -> object:
                _, projected, kv, tables, ints = inputs(device, dtype, 64)
                norm = torch.ones(HEADS + KV_HEADS, DIM, device=device)
                return qk_norm_rope_write(
                    projected, norm, 1e-6, torch.ones(32, device=device), ints, ints, tables, kv,
                    rows_a_program=c[0], heads_a_program=c[1], num_warps=c[2],
                )  # fmt: skip

            launches.append(rope)
    return launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="only the configurations around the ones in use")
    parser.add_argument("--only", choices=["decode", "prefill", "rope"])
    options = parser.parse_args()
    print(f"compiled in {precompile(all_launches()):.1f} s", flush=True)
    began = time.perf_counter()
    bench = Bench()
    for dtype in DTYPES:
        for keys, warps, stages in DECODE_CONFIGS[dtype]:
            for splits in (1, 7, 64):
                check_decode(bench, dtype, DecodeConfig(keys, warps, stages, splits), splits)
        for batch in (1, 16, 64):
            splits = decode_splits(batch, KV_HEADS, PROCESSORS)
            check_decode(bench, dtype, decode_config(bench.pools[dtype], batch), splits)
        for numbers in PREFILL_CONFIGS[dtype]:
            check_prefill(bench, dtype, PrefillConfig(*numbers))
    for dtype in DTYPES:
        if options.only in (None, "decode"):
            for batch, context in DECODE_CASES:
                sweep_decode(bench, dtype, batch, context, not options.quick)
        if options.only in (None, "prefill"):
            for count, length, start in PREFILL_CASES:
                sweep_prefill(bench, dtype, count, length, start)
        if options.only in (None, "rope"):
            for rows in ROPE_CASES:
                sweep_rope(bench, dtype, rows)
    if options.only in (None, "prefill"):
        sweep_torch(bench, 4, 4096)
        sweep_torch(bench, 1, 16384)
    print(f"measured in {time.perf_counter() - began:.1f} s on {torch.cuda.get_device_name()}")
    if options.out is not None:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "checks": bench.errors,
            "rows": [asdict(row) for row in bench.rows],
        }
        options.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
