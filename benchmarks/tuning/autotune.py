"""Gain of the autotuner: `python -m benchmarks.tuning.autotune --model qwen3.5-4b [--quant fp8] --out FILE`.

Random weights of a shape, as benchmarks.serving.rates has them. First the search that `temper tune` makes, with its
gains by rows and the seconds it took; then the rates of whole engines in processes of their own, without and with what
was found, in turn, so that the card's clocks are the same for both. JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import add_model, check_model, checkpoint
from cli.local.process import die_with_parent


def search(options: argparse.Namespace) -> dict[str, Any]:
    """Tunes in this process; what is found goes to TEMPER_CACHE_DIR."""
    from services.pod.preflight import use_kernel_cache

    directory = checkpoint(options.model, options.scratch)
    from benchmarks.lib.in_process import settings_for

    settings = settings_for(
        directory,
        "cuda",
        quantization=options.quant,
        kv_cache_dtype=options.kv,
        cache_dir=options.cache_dir,
        trainer=False,
        tune_seconds=options.seconds,
        **dict(pair.split("=", 1) for pair in options.set),
    )
    use_kernel_cache(settings)
    from services.engine.executors.tuning.choice import describe, name_of
    from services.pod.engine import tune_engine

    def told(seconds: float, text: str) -> None:
        if text:
            print(f"{seconds:5.1f} s  {text}", file=sys.stderr, flush=True)

    began = time.monotonic()
    outcome, path = tune_engine(settings, told)
    for band in outcome.bands:
        print(f"{band.rows:4} rows: {1e6 * band.seconds:7.0f} us, {band.gain:6.2%}", file=sys.stderr)
        for subject, config in band.choice.items():
            print(f"           {name_of(subject)}: {describe(config)}", file=sys.stderr)
    return {
        "seconds": round(outcome.seconds, 1),
        "with_start": round(time.monotonic() - began, 1),
        "trials": outcome.trials,
        "file": str(path),
        "gains": {band.rows: round(band.gain, 4) for band in outcome.bands},
        "us": {band.rows: round(1e6 * band.seconds, 1) for band in outcome.bands},
        "choices": {
            band.rows: {name_of(subject): describe(config) for subject, config in band.choice.items()}
            for band in outcome.bands
        },
    }


def rates(options: argparse.Namespace, tune: str) -> dict[str, float]:
    """Decode tokens a second by the number of requests, of one engine."""
    command = [
        *(sys.executable, "-m", "benchmarks.serving.rates", "--model", options.model, "--cases", options.cases),
        *("--quant", options.quant, "--kv", options.kv, "--device", "cuda", "--scratch", str(options.scratch)),
        *["--random"] * options.random,
    ]
    for pair in (*options.set, f"cache_dir={options.cache_dir}", f"tune={tune}"):
        command += ["--set", pair]
    lines = [json.loads(line) for line in _told(command) if line.startswith("{")]
    return {str(line["c"]): line["decode_tok_s"] for line in lines}


def _told(command: Sequence[str]) -> list[str]:
    """Lines that a process writes, which ends with this one."""
    ending = die_with_parent(os.getpid())
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=ending)
    return done.stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the search")
    parser.add_argument("--cases", default="1x512x256,8x512x256,64x512x256")
    parser.add_argument("--repeats", type=int, default=2, help="engines without and with what was found; 0: none")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/temper"), help="of kernels and what is found")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any other engine setting")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--search-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    check_model(parser, options)
    if options.search_only:  # in a process of its own, whose memory is free when the engines start
        print(json.dumps(search(options)), flush=True)
        return
    command = [sys.executable, "-m", "benchmarks.tuning.autotune", *sys.argv[1:], "--search-only"]
    report: dict[str, Any] = {"model": options.model, "quant": options.quant, "kv": options.kv}
    report |= json.loads(_told(command)[-1])
    runs = [(rates(options, "off"), rates(options, "kept")) for _ in range(options.repeats)]
    for name, index in (("table_tok_s", 0), ("tuned_tok_s", 1)):
        report[name] = {case: [run[index][case] for run in runs] for case in (runs[0][0] if runs else ())}
    report["gain"] = {
        case: round(statistics.median(run[1][case] / run[0][case] - 1 for run in runs), 4)
        for case in (runs[0][0] if runs else ())
    }
    text = json.dumps(report | environment())
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
