"""Time of a decode step's parts, and of changes of one part, inside the step itself.

``python -m benchmarks.tuning.step.sweep --out FILE`` on a Hopper GPU, a minute or two. Layers and head of the 4B shape
with random weights, without the sampler, are captured as a CUDA graph for each number of rows; then again without one
kind of kernel, without one kind of product (its norm, activation and adapters included), without programmatic launch,
and with products cut up otherwise. Each is replayed in turn with the whole step, so that clocks and temperature are the
same for both; the figures are medians of their times and of the differences. What is left out costs at least the
difference: kernels overlap.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.launches import no_products, one_share
from benchmarks.lib.precompile import Launch, precompile
from benchmarks.lib.random_checkpoint import config_of
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe
from benchmarks.tuning import probe_launch
from benchmarks.tuning.step.decode_step import DecodeStep, one_of_each
from benchmarks.tuning.step.variants import Variant, plan
from services.engine.executors.cuda.compile_ahead import compiled_here
from services.engine.models.qwen3_5.config import Qwen3_5Config

_BANDWIDTH = 4.4e12
"""Bytes a second that kernels reach at most on an H200."""
_SAMPLES = 9
_SAMPLE_SECONDS = 8e-3
_PROCESSES = 16


def build(options: argparse.Namespace, config: Qwen3_5Config, device: torch.device, *, empty: bool) -> DecodeStep:
    return DecodeStep(
        config,
        device,
        rows=max(options.rows),
        context=options.context,
        adapters=options.adapters,
        quantization=options.quant,
        kv_dtype=torch.float8_e4m3fn if options.kv == "fp8" else None,
        state_dtype=torch.bfloat16 if options.state == "bfloat16" else torch.float32,
        empty=empty,
    )


def compile_share(options: argparse.Namespace, config: Qwen3_5Config, index: int, device: torch.device) -> None:
    """One of _PROCESSES parts of all kernels (benchmarks/lib/precompile.py runs nothing)."""
    step = build(options, one_of_each(config), device, empty=True)
    with one_share(index, _PROCESSES), no_products():
        if options.probe:
            probe_launch.compile_all(device)
        for variant in plan(step, options):
            if not variant.skipped and not variant.left_out:
                try:
                    variant.launch(step)
                except Exception as error:  # it is reported when it is timed, and must not keep the others back
                    print(f"{variant.what}, {variant.rows} rows: {describe(error)}", flush=True)


class Timer:
    """Captures steps and replays them in turn with the whole one."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # The first graph stays alive: torch takes a pool without graphs for gone.
        self._pool = torch.cuda.graph_pool_handle()
        self._whole: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._tried: tuple[torch.cuda.CUDAGraph, Tensor]
        self._finite = False
        torch.cuda.synchronize()

    def time(self, variant: Variant) -> dict[str, Any]:
        """Microseconds of a variant and of the whole step."""
        place = (variant.rows, variant.adapters)
        with torch.cuda.stream(self._stream):
            if place not in self._whole:
                self._whole[place] = self._capture(Variant("everything", *place, urgency=0))
            if not self._finite:
                self._step.refresh()
            if variant.what == "everything":
                graph, logits = self._whole[place]
            else:
                graph, logits = self._capture(variant)
            figures = self._compare(graph, self._whole[place][0])
            graph.replay()  # the two share memory
            self._finite = bool(torch.isfinite(logits).all())
            return figures | {"finite": self._finite}

    def try_out(self, variant: Variant, best: Variant) -> dict[str, Any]:
        """Microseconds of a variant and of the best of its rows so far, see keep()."""
        with torch.cuda.stream(self._stream):
            self._tried = self._capture(variant)
            return self._compare(self._tried[0], self._whole[best.rows, best.adapters][0])

    def keep(self, variant: Variant) -> None:
        """Keeps a variant: what was tried last is the whole step from now on."""
        self._whole[variant.rows, variant.adapters] = self._tried

    def _capture(self, variant: Variant) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        variant.launch(self._step)  # loads its kernels
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): it collects garbage for a tenth of a second each time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            logits = variant.launch(self._step)
        finally:
            graph.capture_end()
        return graph, logits

    def _compare(self, graph: torch.cuda.CUDAGraph, whole: torch.cuda.CUDAGraph) -> dict[str, Any]:
        event: Any = torch.cuda.Event  # has no annotations

        def marks(count: int) -> list[Any]:
            return [event(enable_timing=True) for _ in range(count)]

        def replays(of: torch.cuda.CUDAGraph, count: int) -> None:
            for _ in range(count):
                of.replay()

        replays(graph, 1)
        begin, end = marks(2)
        begin.record()
        replays(whole, 2)
        end.record()
        end.synchronize()
        count = max(1, round(_SAMPLE_SECONDS / (begin.elapsed_time(end) / 2e3)))
        times = marks(2 * _SAMPLES + 1)
        replays(graph, 1)
        times[0].record()
        for sample in range(_SAMPLES):
            replays(graph, count)
            times[2 * sample + 1].record()
            replays(whole, count)
            times[2 * sample + 2].record()
        times[-1].synchronize()
        taken = [1e3 * a.elapsed_time(b) / count for a, b in pairwise(times)]
        mine, theirs = taken[0::2], taken[1::2]
        differences = [a - b for a, b in zip(mine, theirs, strict=True)]
        return {
            "us": round(statistics.median(mine), 2),
            "whole_us": round(statistics.median(theirs), 2),
            "difference_us": round(statistics.median(differences), 2),
            "spread_us": round(
                statistics.quantiles(differences, n=4)[2] - statistics.quantiles(differences, n=4)[0], 2
            ),
        }


@torch.inference_mode()
def measure(step: DecodeStep, wanted: list[Variant], recorder: Recorder, clock: Clock) -> None:
    """Records a row for each variant, until the time is over."""
    timer = Timer(step)
    for variant in wanted:
        if clock.over:
            print("out of time", flush=True)
            return
        if variant.what != "everything" and recorder.done(variant.key):
            continue
        row = dict(variant.key)
        try:
            row |= timer.time(variant) | ({"launches": variant.launches} if variant.launches else {})
        except Exception as error:  # one variant that does not run must not end the others
            row["failed"] = describe(error)
        recorder.add(row)
        if "failed" in row:
            carry_on_or_start_again("benchmarks.tuning.step.sweep")


def table(rows: list[dict[str, Any]], floors: dict[str, float]) -> str:
    """Microseconds of each variant and the difference to the whole step; by numbers of rows."""
    lines: list[str] = []
    for adapters in (False, True):
        mine = [row for row in rows if row["adapters"] == adapters and "what" in row]
        counts = sorted({row["rows"] for row in mine})
        if not mine:
            continue
        lines.append("with adapters" if adapters else "without adapters")
        lines.append(f"  {'rows':<34}" + "".join(f"{count:>20}" for count in counts))
        lines.append(f"  {'bytes at 4.4 TB/s':<34}" + "".join(f"{floors[str(count)]:>15.0f}     " for count in counts))
        for what in dict.fromkeys(row["what"] for row in mine):
            found = {row["rows"]: row for row in mine if row["what"] == what}
            lines.append(f"  {what:<34}" + "".join(f"{_cell(found.get(count)):>20}" for count in counts))
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "failed"
    wild = "" if row["finite"] else "~"
    difference = "" if row["what"] == "everything" else f"{row['difference_us']:+.1f}"
    return f"{wild}{row['us']:.0f}{difference:>8}" + (f" x{row['launches']:<3}" if "launches" in row else "     ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 16, 64, 256]
    )
    parser.add_argument("--adapters", type=int, default=0, metavar="N", help="also with row i using adapter i mod N")
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--state", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--context", type=int, default=600, help="tokens of each sequence")
    parser.add_argument("--only", default="", metavar="REGEX", help="variants whose name it is found in")
    parser.add_argument("--seconds", type=float, default=75.0, help="most time to spend timing")
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--probe", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of such a --out")
    options = parser.parse_args()
    if options.table is not None:
        result = json.loads(options.table.read_text())
        print(probe_launch.report(result.get("probe", [])), table(result["rows"], result["floor_us"]), sep="\n")
        return
    config = Qwen3_5Config.from_dict(config_of(options.shape))
    shares: list[Launch] = [partial(compile_share, options, config, index) for index in range(_PROCESSES)]
    print(f"compiled in {precompile(shares):.0f} s", flush=True)
    # A step that hangs would take all of the time of whoever waits for it.
    faulthandler.dump_traceback_later(options.seconds + 90, exit=True)
    device = torch.device("cuda")
    recorder = Recorder(options.out, resume=options.resume)
    if options.probe and not options.resume:
        probed = probe_launch.probe(device)
        recorder.note(probe=probed)
        print(probe_launch.report(probed), flush=True)
    clock = Clock(options.seconds)
    step = build(options, config, device, empty=False)
    floors = {str(rows): 1e6 * step.bytes_a_step(rows) / _BANDWIDTH for rows in options.rows}
    recorder.note(floor_us=floors)
    with compiled_here() as late:
        measure(step, plan(step, options), recorder, clock)
    if late:
        print("compiled while measuring, because not ahead:", Counter(late))
    print(table(recorder.rows, floors))
    for row in recorder.rows:
        if "failed" in row:
            print("failed:", row)


if __name__ == "__main__":
    main()
