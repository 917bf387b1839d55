"""Decode and prefill rates of the engine in this process: `python -m benchmarks.serving.rates --cases
1x512x128,64x512x256`.

A case is requests x prompt tokens x new tokens. Random prompts, temperature 1, ignore_eos, prefix cache off. t(n) is
the time from the first submission to the last of n tokens of all requests, the best of two after a warm-up:
decode = c · (out - 1) / (t(out) - t(1)) tokens a second, prefill = c · in / t(1). The figures of other engines in
README.md come from the same formulas. Beside each rate stands the least time of a step, that of moving what it moves
once, at the bandwidth of a copy that is measured first (benchmarks.serving.floor). One JSON line a case. Random weights
are made on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.lib.cases import Case, milliseconds
from benchmarks.lib.environment import environment, gpu
from benchmarks.lib.random_checkpoint import add_model, check_model, config_of, without_weights
from benchmarks.lib.recorder import describe
from benchmarks.lib.stages import Stages

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine, Run
    from services.engine.loop.step_pipeline import StepPipeline

_REPEATS = 2
_WARM_TOKENS = 12


def measure(engine: InProcessEngine, case: Case) -> dict[str, Any]:
    """Measures one case on an InProcessEngine, in the fields of the tables in README.md."""
    from benchmarks.lib.step_times import by_kind, recorded_steps

    process = psutil.Process()
    engine.generate(engine.prompts(case.requests, case.prompt_tokens), min(case.new_tokens, _WARM_TOKENS))
    first = [engine.generate(engine.prompts(case.requests, case.prompt_tokens), 1) for _ in range(_REPEATS)]
    one = min(run.seconds for run in first)
    runs: list[tuple[float, Run, list[dict[str, Any]]]] = []
    for _ in range(_REPEATS):
        prompts = engine.prompts(case.requests, case.prompt_tokens)
        before, began = sum(process.cpu_times()[:2]), time.perf_counter()
        with recorded_steps(engine.pipeline) as steps:
            run = engine.generate(prompts, case.new_tokens)
        cores = (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - began)
        runs.append((cores, run, by_kind(steps)))
    cores, best, kinds = min(runs, key=lambda each: each[1].seconds)
    to_first, between = best.latencies()
    return {
        "c": case.requests,
        "in": case.prompt_tokens,
        "out": case.new_tokens,
        "decode_tok_s": round(case.requests * (case.new_tokens - 1) / (best.seconds - one), 1),
        "t1_s": round(one, 4),
        "prefill_tok_s": round(case.requests * case.prompt_tokens / one, 1),
        "t_out_s": round(best.seconds, 4),
        "ttft_ms": milliseconds(to_first),
        "itl_ms": milliseconds(between),
        "host_cpu_cores": round(cores, 2),
        "steps": kinds,
        "gpu_after": gpu(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--cases", type=lambda text: [Case.parse(part) for part in text.split(",")], required=True)
    parser.add_argument("--lora", type=int, default=0, metavar="N", help="request i uses adapter i mod N")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--compose", type=int, default=1, metavar="N", help="each of them is N adapters of the rank, composed in a slot"
    )
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--state", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prefill-float8", default="none", metavar="CHOICE", help="as of TEMPER_PREFILL_FLOAT8")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any other engine setting")
    parser.add_argument(
        "--mixed",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[],
        metavar="N,...",
        help="measure each case with up to N prompt tokens beside decodes, for each N; steps above the setting "
        "mixed_prefill_tokens are not captured",
    )
    parser.add_argument("--swaps", type=int, default=0, metavar="N", help="load N adapters while each case decodes")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="timeline of a decode (.json or .json.gz) per case"
    )
    parser.add_argument(
        "--acceptance", type=float, metavar="SHARE", help="with --set speculative=mtp: so many draft tokens are right"
    )
    parser.add_argument(
        "--block", type=int, metavar="N", help="draft with a block drafter of random numbers that proposes N tokens"
    )
    parser.add_argument("--block-layers", type=int, default=1, metavar="N", help="layers of it")
    parser.add_argument("--seconds", type=float, default=540.0, help="start no case after this")
    parser.add_argument("--out", type=Path, help="directory for serving.jsonl")
    options = parser.parse_args()
    check_model(parser, options)
    run(options)


def run(options: argparse.Namespace) -> None:
    """Builds the engine once and measures all cases."""
    from services.pod.preflight import use_kernel_cache

    began = time.perf_counter()
    directory = Path(options.model)
    if options.random:
        directory = without_weights(options.scratch / f"{options.model}-config", config_of(options.model))
    stages = Stages(time.time())
    # Imported after Triton's cache is chosen.
    from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for
    from benchmarks.serving.acceptance import impose
    from benchmarks.serving.floor import beside_floor, measured_bandwidth
    from benchmarks.serving.random_engine import RANDOM_DIGEST, made_on_the_device, write_drafter
    from benchmarks.serving.swaps import measure_swaps
    from benchmarks.serving.timeline import prepare, profile_decode
    from services.common.adapters.drafter_form import DrafterForm
    from services.engine.models.checkpoint import checkpoint_digest

    given = dict(pair.split("=", 1) for pair in options.set)
    if options.block is not None:
        form = DrafterForm(options.block, options.block_layers)
        drafter = options.scratch / f"{options.model.replace('/', '-')}-block"
        write_drafter(directory, drafter, form, RANDOM_DIGEST if options.random else checkpoint_digest(directory))
        given |= {"speculative": "mtp", "drafter": str(drafter.resolve())}
    settings = settings_for(
        directory,
        options.device,
        quantization=options.quant,
        kv_cache_dtype=options.kv,
        state_dtype=options.state,
        prefill_float8=options.prefill_float8,
        batch_invariant=options.batch_invariant,
        max_num_seqs=max(case.requests for case in options.cases) if options.device == "cpu" else 0,
        **given,
    )
    stages.done("imports")
    stages.listen()
    use_kernel_cache(settings)
    if options.profile:
        prepare()
    bandwidth = measured_bandwidth(settings)  # while there is memory for it
    stages.done("bandwidth of a copy")
    with made_on_the_device() if options.random else nullcontext():
        adapters = options.lora or int(options.swaps > 0)
        engine = InProcessEngine(settings, adapters=adapters, rank=options.rank, composed=options.compose)
    stages.done("rest of the start")
    only_warnings()
    pipeline = engine.pipeline
    if options.acceptance is not None:
        from services.engine.executors.cuda.runner import CudaRunner

        if not isinstance(pipeline._runner, CudaRunner):
            raise SystemExit("--acceptance is imposed on a GPU's runner: use --device cuda")
        impose(pipeline._runner, options.acceptance)
    common = {
        "model": options.model,
        "lora": options.lora,
        "rank": options.rank,
        "compose": options.compose,
        "quant": options.quant,
        "kv": options.kv,
        "state": options.state,
        "prefill_float8": options.prefill_float8,
        "batch_invariant": options.batch_invariant,
        "settings": options.set,
        "block": options.block and [options.block, options.block_layers],
        "start_s": round(time.perf_counter() - began, 2),
        "start": stages.seconds(),
        **environment(),
    }
    try:
        for case, mixed in product(options.cases, options.mixed or [None]):
            if time.perf_counter() - began > options.seconds:
                sys.stderr.write(f"no time left for {case}\n")
                break
            before = pipeline.scheduler.counts()
            report = common | {"case": asdict(case)}
            if mixed is not None:
                _mix(pipeline, mixed)
                report["mixed_prefill_tokens"] = mixed
            try:
                report |= measure(engine, case)
                rate = report["decode_tok_s"]
                report |= beside_floor(engine, case, rate, lora=options.lora, bandwidth=bandwidth)
                after = pipeline.scheduler.counts()
                if after.num_draft_tokens > before.num_draft_tokens:
                    right = after.num_accepted_tokens - before.num_accepted_tokens
                    report["acceptance"] = round(right / (after.num_draft_tokens - before.num_draft_tokens), 4)
                    drafts = after.num_drafts - before.num_drafts
                    report["accepted_length"] = round(1 + right / drafts, 3)
                    report["draft_tokens"] = round((after.num_draft_tokens - before.num_draft_tokens) / drafts, 3)
                left = options.seconds - (time.perf_counter() - began)
                if options.swaps:
                    report["swaps"] = measure_swaps(engine, case, options.swaps, seconds=left)
                if options.profile:
                    name = f"{case.requests}x{case.prompt_tokens}x{case.new_tokens}-{options.profile.name}"
                    report["timeline"] = profile_decode(engine, case, options.profile.with_name(name))
            except Exception as error:  # the other cases' figures are still wanted
                report["failed"] = describe(error)
            _print(report, options.out)
    finally:
        engine.stop()


def _mix(pipeline: StepPipeline, tokens: int) -> None:
    """Sets how many prompt tokens a step with decodes holds, at most."""
    pipeline.scheduler.config = replace(pipeline.scheduler.config, mixed_prefill_tokens=tokens)


def _print(report: dict[str, Any], out: Path | None) -> None:
    if "of_floor" in report:
        sys.stderr.write(
            f"{report['model']} {report['quant']} c={report['c']}: {report['decode_tok_s']} tok/s, a step takes "
            f"{report['step_us']} us, its floor is {report['floor_us']} us ({100 * report['of_floor']:.0f} %)\n"
        )
    line = json.dumps(report)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "serving.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
