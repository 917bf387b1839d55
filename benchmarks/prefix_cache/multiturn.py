"""Multi-turn traffic on the engine in this process: `python -m benchmarks.prefix_cache.multiturn --model qwen3.5-4b
--random`.

Workloads of random tokens, seeded, with ignore_eos and temperature 1; prompts are raw tokens, without a word about
where messages end (`--marks` tells):

- a: W3, 16 at a time: 64 sessions of 4 turns (1,024 ± 32 tokens, then 64 ± 8 each) and 64 single requests; 64 out
- b: W4, 8 at a time: 128 sessions of 2 turns (8,192 ± 64, then 256 of a tool); 256 out
- c: 16 agents at once, 8 turns: 6,000, then 3,900 each; 214 out; a turn begins when all have ended the one before
- d: 256 requests at once on 8 prompts of 2,000 tokens, each with 100 of its own; 64 out
- e: GRPO: 8 prompts of 512, 16 times each, all at once; 256 out
- w: one request at a time: 1,024 and the 64 behind it, 8,192 and the 256 behind it, 20 times; 16 out
- t, if asked for: the last by where the history lies, see benchmarks.prefix_cache.tier_restore; in engines of its own

A prompt is the one before, its answer and what is new. One JSON line a workload, and a table at the end:

- seconds: from the first submission to the last token; out_tok_s: by them
- ttft_ms: from submitting a request to its first update with a token, on the loop's clock. warm: of prompts of which
  something was computed before; cold: the others
- cached: prompt tokens that requests say came from the cache; from: by tier. ideal: what was computed before (all but
  what is new and the last token sampled; of a prompt that another request has, too, all of it that is equal, but for
  the last token)
- compiled: kernels that the engine's start had not compiled, warm-up included
- prefilled: tokens of prompts that steps computed; new: prompt tokens less the ideal, the least there is to compute

The device's cache is emptied before each workload, behind a short run of its kind, of other tokens, that warms up.
Tiers are as the engine's settings have them (`--tiers`). If the histories of W4 do not
fit the KV blocks all at once, it has fewer sessions (`sessions` beside `of`). `--scale` makes sessions fewer and
`--shrink` everything shorter: neither on a GPU; by 50 and 16 on a CPU, where all there is to see is that it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.environment import environment, gpu
from benchmarks.lib.multiturn_workloads import GENERATORS, Sizes, Workload, fitting
from benchmarks.lib.random_checkpoint import add_model, check_model, checkpoint
from benchmarks.lib.recorder import describe, put_line
from benchmarks.prefix_cache import tier_restore
from benchmarks.prefix_cache.traffic import Traffic, report

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine

PEERS: dict[str, dict[str, Any]] = {
    "c": {
        "seconds": 22.2,
        "out_tok_s": 1237,
        "turn_seconds": [2.59, 2.33, 2.49, 2.60, 2.75, 3.00, 3.11, 3.27],
        "turn_cached": [0, 0.57, 0.71, 0.78, 0.82, 0.84, 0.86, 0.88],
    },
    "d": {"seconds": 3.61, "cached": 405_504, "ideal": 512_000},
    "w1024": {"warm_ttft_ms": 73},
    "w8192": {"warm_ttft_ms": 46, "cold_ttft_ms": 138},
}
PEER = "vLLM 0.26.0, one H200, 2026-11-21, prefix caching on (block 528, mamba mode align), a run of its own"
_ROOM = 0.97
"""Share of the KV blocks for histories."""
_SNAPSHOTS = ((100, 320), (0, 144))
"""State snapshots on a GPU of at least so many GiB: some 54 MB each."""
_WARM_UP_SEED = 1_000_000
"""Added for the tokens of what warms up."""


def measure(
    engine: InProcessEngine, workload: Workload, *, warm_up: Workload | None = None, marks: bool
) -> dict[str, Any]:
    """Runs a workload on an engine whose device keeps nothing; the fields above.

    Args:
        warm_up: of the same kind, with other tokens; None: the workload itself.
    """
    from benchmarks.lib.step_times import recorded_steps

    began = time.perf_counter()
    warm = _short(warm_up or workload)
    with _compiled(engine) as compiled:
        Traffic(engine, warm, f"{workload.name}-warm-up", marks=marks).run()
        _clear(engine)
        warmed = time.perf_counter()
        before = engine.engine.loop.status().counts
        with recorded_steps(engine.pipeline) as steps:
            sent = Traffic(engine, workload, workload.name, marks=marks).run()
    # The last step's figures may come behind its updates.
    after = engine.engine.loop.call_at_boundary(engine.pipeline.scheduler.counts).result()
    found = report(workload, sent)
    found["prefilled"] = sum(step.prefill_tokens for step in steps)
    found["steps"] = len(steps)
    found["compiled"] = sorted(compiled)
    found["counts"] = asdict(after)
    found["counts_before"] = asdict(before)
    found["warm_up_s"] = round(warmed - began, 2)
    found["measured_s"] = round(time.perf_counter() - warmed, 2)
    return found


def _compiled(engine: InProcessEngine) -> AbstractContextManager[list[str]]:
    """Names the kernels that are compiled inside. A CPU has none, nor Triton everywhere."""
    if engine.engine.model.device.type != "cuda":
        return nullcontext([])
    from services.engine.executors.cuda.compile_ahead import compiled_here

    return compiled_here()


def _short(workload: Workload) -> Workload:
    """Workload of as many requests at once, a few tokens each: whatever an engine compiles or captures for this
    workload."""
    kept = workload.order[: workload.concurrency]
    sessions = tuple(
        replace(session, turns=tuple(replace(turn, out=min(turn.out, 8)) for turn in session.turns[:2]))
        for session in workload.sessions
    )
    second = tuple(number for number in dict.fromkeys(kept) if len(sessions[number].turns) > 1)
    order = (*dict.fromkeys(kept), *second)
    return replace(workload, sessions=sessions, order=order)


def _clear(engine: InProcessEngine) -> None:
    engine.engine.loop.call_at_boundary(lambda: engine.pipeline.scheduler.clear_cache()).result()


_HEAD = ("", "seconds", "out tok/s", "TTFT cold", "warm, ms", "cached / ideal", "prefilled / new")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The results for people, vLLM's beside them where it was measured."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for line in lines:
        if "failed" in line:
            rows.append((line["workload"], line["failed"], "", "", "", "", ""))
            continue
        rows.append(
            (
                line["workload"],
                f"{line['seconds']:.2f}",
                f"{line['out_tok_s']:,.0f}",
                *(_pair(line["ttft_ms"].get(kind)) for kind in ("cold", "warm")),
                f"{line['cached']:,} / {line['ideal']:,}",
                f"{line['prefilled']:,} / {line['new']:,}",
            )
        )
        if peer := line["peer"]:
            cached = f"{peer['cached']:,} / {peer['ideal']:,}" if "cached" in peer else ""
            rates = [f"{peer[name]:,g}" if name in peer else "" for name in ("seconds", "out_tok_s")]
            first = [f"{peer[name]:g}" if name in peer else "" for name in ("cold_ttft_ms", "warm_ttft_ms")]
            rows.append(("  vLLM 0.26", *rates, *first, cached, ""))
        if len(line["turns"]) > 2:
            turns = [f"{turn['seconds']:.2f} s {turn['cached']:.0%}" for turn in line["turns"]]
            rows.append(("  turns", ", ".join(turns), *[""] * 5))
            if "turn_seconds" in line["peer"]:
                pairs = zip(line["peer"]["turn_seconds"], line["peer"]["turn_cached"], strict=True)
                rows.append(("  vLLM 0.26", ", ".join(f"{one:.2f} s {share:.0%}" for one, share in pairs), *[""] * 5))
    widths = [max(len(row[at]) for row in rows if any(row[2:])) for at in range(len(_HEAD))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*text, "TTFT: p50 / p95", *([PEER] if any(line["peer"] for line in lines) else [])])


def _pair(times: dict[str, float] | None) -> str:
    return f"{times['p50']:.1f} / {times['p95']:.1f}" if times else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--workload", default="a,b,c,d,e,w", help="letters, with commas")
    parser.add_argument("--scale", type=float, default=0.0, help="times the sessions; 0: 1 on a GPU, 0.02 on a CPU")
    parser.add_argument("--shrink", type=float, default=0.0, help="divides lengths; 0: by 1 on a GPU, 16 on a CPU")
    parser.add_argument("--cache", choices=("on", "off"), default="on")
    parser.add_argument("--marks", action="store_true", help="tell the engine where messages end, and sessions")
    parser.add_argument("--tiers", help="below the device; none: as the engine's settings have it, empty: none")
    parser.add_argument("--snapshots", type=int, default=0, help="state snapshots; 0: by the GPU's memory")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any other engine setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="start no workload after this")
    parser.add_argument("--out", type=Path, help="file to append the results to")
    options = parser.parse_args()
    options.workload = options.workload.split(",")
    unknown = [name for name in options.workload if name not in (*GENERATORS, "t")]
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(GENERATORS)} and t")
    check_model(parser, options)
    if "t" in options.workload:
        # Before there is an engine here, which would hold the device's memory.
        options.workload.remove("t")
        cuda = options.device == "cuda" or (options.device == "auto" and gpu() is not None)
        tier_restore.run(options, shrink=options.shrink or (1.0 if cuda else 16.0))
    sys.exit(run(options) if options.workload else 0)


def run(options: argparse.Namespace) -> int:
    """Builds the engine once and runs all workloads; the exit status."""
    from services.pod.preflight import use_kernel_cache

    began = time.perf_counter()
    directory = checkpoint(options.model, options.scratch)
    written = time.perf_counter() - began
    # Imported after Triton's cache is chosen.
    from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for

    only_warnings()
    settings = settings_for(directory, options.device, **engine_settings(options))
    use_kernel_cache(settings)
    engine = InProcessEngine(settings, prefix_cache=options.cache == "on")
    memory, loop = engine.engine.memory, engine.engine.loop
    cuda = engine.engine.model.device.type == "cuda"
    sizes = Sizes(
        engine.vocab_size,
        options.seed,
        sessions=options.scale or (1.0 if cuda else 0.02),
        tokens=1.0 / (options.shrink or (1.0 if cuda else 16.0)),
    )
    start = {"checkpoint_s": round(written, 2), "start_s": round(time.perf_counter() - began - written, 2)}
    common = {
        "benchmark": "multiturn",
        "model": options.model,
        "command": "python -m benchmarks.prefix_cache.multiturn " + " ".join(sys.argv[1:]),
        "cache": options.cache,
        "tiers": settings.tiers,
        "marks": options.marks,
        "sizes": asdict(sizes),
        "engine": {
            **asdict(loop.config) | {"eos_token_ids": sorted(loop.config.eos_token_ids)},
            "capacity_tokens": memory.capacity_tokens,
            "bytes": memory.parts(),
        },
        **start,
        **environment(),
    }
    print(f"{memory.num_blocks:,} KV blocks, {loop.config.num_slots} state slots, {start}", memory.table(), sep="\n")
    lines: list[dict[str, Any]] = []
    try:
        for name in options.workload:
            others = GENERATORS[name](replace(sizes, seed=sizes.seed + _WARM_UP_SEED))
            for workload, other in zip(GENERATORS[name](sizes), others, strict=True):
                if time.perf_counter() - began > options.seconds:
                    lines.append({"workload": workload.title, "failed": "no time left", "peer": {}})
                    continue
                chosen = fitting(workload, int(_ROOM * memory.capacity_tokens)) if name == "b" else workload
                line = {
                    "name": workload.name,
                    "workload": workload.title,
                    "sessions": len(chosen.sessions),
                    "of": len(workload.sessions),
                    "peer": PEERS.get(workload.name, {}) if sizes.whole else {},
                }
                try:
                    line |= measure(engine, chosen, warm_up=other, marks=options.marks)
                except Exception as error:  # the other workloads' figures are still wanted
                    line["failed"] = describe(error)
                lines.append(line)
                put_line(common | line | {"gpu_after": gpu()}, options.out)
    finally:
        engine.stop()
    print(table(lines), f"{time.perf_counter() - began:.0f} s in all, {start}", sep="\n", flush=True)
    return 1 if any("failed" in line for line in lines) else 0


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings that the workloads need, chosen here and not by the engine: 256 sequences, as many snapshots as sessions
    and more, nothing for training, all else for KV."""
    from torch import cuda

    given: dict[str, Any] = dict(pair.split("=", 1) for pair in options.set)
    if options.tiers is not None:
        given["tiers"] = options.tiers
    if options.device == "cpu" or not cuda.is_available():
        return {"max_num_seqs": 32, "state_snapshots": options.snapshots or 64} | given
    gib = cuda.get_device_properties(0).total_memory / 2**30
    snapshots = next(count for least, count in _SNAPSHOTS if gib >= least)
    return {"max_num_seqs": 256, "state_snapshots": options.snapshots or snapshots, "max_model_len": 40_960} | given


if __name__ == "__main__":
    main()
