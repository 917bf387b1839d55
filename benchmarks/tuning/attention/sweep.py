"""Times every configuration of the attention kernels at the 4B shape, and checks each against float64 first.

``python -m benchmarks.tuning.attention.sweep [--out FILE] [--quick]`` prints a line a case (the fastest configurations,
the one in use, their bandwidth or FLOP rate) and writes all rows as JSON. Launches are timed inside CUDA graphs over
enough different sequences that the cache holds none of their pages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.precompile import Launch, precompile
from benchmarks.lib.recorder import Clock, Recorder
from benchmarks.tuning.attention.cases import (
    DEVICE,
    DIM,
    DTYPES,
    HEADS,
    KV_HEADS,
    PAGE,
    WIDTH,
    Bench,
    check_decode,
    check_prefill,
    describe,
    name_of,
    token_bytes,
)
from kernels.gpu.attention.decode import DecodeConfig, DecodeWorkspace, decode_config, decode_splits, paged_decode
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.attention.prefill import OVERLAPPED, PrefillConfig, paged_prefill, prefill_config
from kernels.gpu.attention.qk_rope import qk_norm_rope_write
from kernels.gpu.segments import Segments
from kernels.rope import Rotation

DECODE_CASES = [(batch, context) for batch in (1, 8, 16, 64, 256) for context in (600, 4200)]
DECODE_CASES += [(1, 32768), (8, 32768), (16, 20000), (32, 20000), (64, 10000), (1, 131072)]
PREFILL_CASES = [
    (1, 512, 0),
    (16, 512, 0),
    (4, 4096, 0),
    (1, 16384, 0),
    (1, 512, 32768),
    (1, 3840, 16000),
    (1, 3840, 32000),
]
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


def prefill_configs(dtype: torch.dtype) -> list[PrefillConfig]:
    """All that are tried."""
    overlapped = [OVERLAPPED] if dtype == _BF16 else []
    return [*overlapped, *(PrefillConfig(*numbers) for numbers in PREFILL_CONFIGS[dtype])]


def sweep_decode(bench: Bench, dtype: torch.dtype, batch: int, context: int, full: bool) -> None:
    kv, size = bench.pools[dtype], batch * context * token_bytes(dtype)
    copies = max(2, min(48, 400_000_000 // size))
    tables = bench.tables([context] * batch, copies)
    q = torch.randn(batch, HEADS, DIM, device=bench.device, dtype=_BF16)
    projected = torch.randn(batch, WIDTH, device=bench.device, dtype=_BF16)
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device=bench.device)
    slots = [torch.arange(batch, dtype=torch.int32, device=bench.device) + 1 + batch * i for i in range(copies)]
    out = torch.empty(batch, HEADS * DIM, device=bench.device, dtype=_BF16)

    def measure(config: DecodeConfig, splits: int, in_use: bool = False) -> None:
        workspace = DecodeWorkspace.allocate(batch, HEADS, KV_HEADS, splits, DIM, bench.device)

        def launch(rows: Tensor) -> Callable[[], object]:
            return lambda: paged_decode(
                q, projected, kv, tables, rows, positions, splits, workspace=workspace, out=out, config=config
            )

        what = f"{describe(config)} launched={splits}"
        case = f"{batch} x {context}"
        bench.measure("decode", case, name_of(dtype), what, in_use, lambda: [launch(rows) for rows in slots], size)

    used, launched = decode_config(kv, batch, DEVICE), decode_splits(batch, KV_HEADS, DEVICE)
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
    used = prefill_config(kv, HEADS, DEVICE)
    configs = [used, *(c for c in prefill_configs(dtype) if c != used)]
    case = f"{count} x {length}" + (f" after {start}" if start else "")
    for config in configs:
        run = partial(paged_prefill, q, projected, kv, tables, segments, out=out, config=config)
        bench.measure("prefill", case, name_of(dtype), describe(config), config == used, lambda r=run: [r] * 3, flop)  # type: ignore[misc]
    show(bench, "prefill", case, name_of(dtype), "TFLOP/s")


def sweep_torch(bench: Bench, count: int, length: int) -> None:
    """Prefill attention by torch's scaled_dot_product_attention, without pages or gate."""
    q = torch.randn(count, HEADS, length, DIM, device=bench.device, dtype=_BF16)
    k, v = (torch.randn(count, HEADS, length, DIM, device=bench.device, dtype=_BF16) for _ in range(2))
    flop = 4 * HEADS * DIM * count * length * (length + 1) / 2
    run = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    bench.measure(
        "prefill", f"{count} x {length}", "torch", "scaled_dot_product_attention", False, lambda: [run] * 3, flop
    )
    show(bench, "prefill", f"{count} x {length}", "torch", "TFLOP/s")


def sweep_rope(bench: Bench, dtype: torch.dtype, rows: int) -> None:
    kv, tables = bench.pools[dtype], bench.tables([rows], 1)
    copies = max(2, min(48, 400_000_000 // (rows * WIDTH * 2)))
    inputs = [torch.randn(rows, WIDTH, device=bench.device, dtype=_BF16) for _ in range(copies)]
    norm, rotation = (
        torch.ones(HEADS + KV_HEADS, DIM, device=bench.device),
        Rotation(torch.ones(32, device=bench.device)),
    )
    positions = torch.arange(rows, dtype=torch.int32, device=bench.device)
    slots = torch.ones(rows, dtype=torch.int32, device=bench.device)
    out = torch.empty(rows, HEADS, DIM, device=bench.device, dtype=_BF16)
    size = rows * ((HEADS + 2 * KV_HEADS) * DIM * 2 + HEADS * DIM * 2 + token_bytes(dtype))
    for tile, group, warps in ROPE_CONFIGS:
        knobs: dict[str, Any] = {"rows_a_program": tile, "heads_a_program": group, "num_warps": warps}

        def launch(x: Tensor, knobs: dict[str, Any] = knobs) -> Callable[[], object]:
            return lambda: qk_norm_rope_write(x, norm, 1e-6, rotation, positions, slots, tables, kv, out=out, **knobs)

        what = " ".join(f"{key}={value}" for key, value in knobs.items())
        ready = [launch(x) for x in inputs]
        bench.measure("rope", str(rows), name_of(dtype), what, tile == 0, lambda r=ready: r, size)  # type: ignore[misc]
    show(bench, "rope", str(rows), name_of(dtype), "TB/s")


def show(bench: Bench, kernel: str, case: str, pages: str, unit: str) -> None:
    key = (kernel, case, pages)
    rows = [row for row in bench.recorder.rows if (row.get("kernel"), row.get("case"), row.get("pages")) == key]
    if not rows:
        return
    print(f"{kernel} {case} {pages}")
    timed = sorted((row for row in rows if "us" in row), key=lambda row: float(row["us"]))
    for row in [*timed[:4], *(row for row in timed[4:] if row["in_use"])]:
        mark = "*" if row["in_use"] else " "
        print(f"  {mark} {row['us']:9.2f} us {row['rate']:7.2f} {unit}  {row['config']}", flush=True)
    for row in rows:
        if "failed" in row:
            print(f"    FAILED {row['config']}: {row['failed']}", flush=True)


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
        for chosen in prefill_configs(dtype):

            def prefill(device: Any, dtype: torch.dtype = dtype, c: PrefillConfig = chosen) -> object:
                q, projected, kv, tables, _ = inputs(device, dtype, 64)
                segments = Segments.build([64], [0], [1], [0], device)
                return paged_prefill(q, projected, kv, tables, segments, config=c)

            launches.append(prefill)
        for tile, group, warps in ROPE_CONFIGS[1:]:

            def rope(device: Any, dtype: torch.dtype = dtype, c: Any = (tile, group, warps)) -> object:
                _, projected, kv, tables, ints = inputs(device, dtype, 64)
                norm = torch.ones(HEADS + KV_HEADS, DIM, device=device)
                return qk_norm_rope_write(
                    projected, norm, 1e-6, Rotation(torch.ones(32, device=device)), ints, ints, tables, kv,
                    rows_a_program=c[0], heads_a_program=c[1], num_warps=c[2],
                )  # fmt: skip

            launches.append(rope)
    return launches


def check_all(bench: Bench) -> None:
    for dtype in DTYPES:
        decodes = [(DecodeConfig(*cut, splits), splits) for cut in DECODE_CONFIGS[dtype] for splits in (1, 7, 64)]
        for batch in (1, 16, 64):
            decodes.append((decode_config(bench.pools[dtype], batch, DEVICE), decode_splits(batch, KV_HEADS, DEVICE)))
        for config, splits in decodes:
            what = f"decode {name_of(dtype)} {describe(config)} splits {splits}"
            bench.check(what, partial(check_decode, bench, dtype, config, splits))
        for chosen in prefill_configs(dtype):
            what = f"prefill {name_of(dtype)} {describe(chosen)}"
            bench.check(what, partial(check_prefill, bench, dtype, chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="only the configurations around the ones in use")
    parser.add_argument("--only", choices=["decode", "prefill", "rope"])
    parser.add_argument("--no-check", action="store_true", help="only time")
    parser.add_argument("--seconds", type=float, default=120.0, help="most time to spend on the device")
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    options = parser.parse_args()
    print(f"compiled in {precompile(all_launches()):.1f} s", flush=True)
    began = time.perf_counter()
    clock = Clock(options.seconds)
    bench = Bench(Recorder(options.out, resume=options.resume), clock)
    if not options.no_check:
        check_all(bench)
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
    print(f"{'out of time: ' if clock.over else ''}measured in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
