"""Every GPU kernel at the shapes of Qwen3.5-4B: `python -m benchmarks.kernels.all [--only TEXT] [--seconds N] [--out
DIR]`.

Times are of one launch inside a CUDA graph, on inputs that rotate over more memory than L2 holds. Bytes and FLOP are
those of the algorithm; "of copy" and "of matmul" are fractions of what this device reached in the same run. Beside
each timing stands the error against float64. Kernels are compiled on all cores before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import linear as kernel_linear
from benchmarks.kernels import mixers as kernel_mixers
from benchmarks.kernels import rows as kernel_rows
from benchmarks.kernels.timing import Case, Ceilings, Tensors, errors, measure_ceilings, microseconds
from benchmarks.lib.precompile import precompile
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe


def all_cases() -> list[Case]:
    return list(chain(kernel_linear.cases(), kernel_mixers.cases(), kernel_rows.cases()))


def measure(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    """Row of the table for one case."""
    work = case.make(Tensors(torch.device("cuda")))
    report: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape}
    if work.check is not None:
        # The first run alone sees the inputs as they were made: some kernels work in place.
        report |= errors(*work.check(work.runs[0]()))
    taken = microseconds(work.runs)
    report |= {
        "us": round(taken, 2),
        "bytes": work.bytes,
        "flops": work.flops,
        "tb_s": round(work.bytes / taken * 1e-6, 3),
        "tflop_s": round(work.flops / taken * 1e-6, 1),
        "of_copy": round(work.bytes / taken * 1e6 / ceilings.copy, 3),
        "of_matmul": round(work.flops / taken * 1e6 / ceilings.matmul, 3),
    }
    for name, rival in work.rivals.items():
        report[f"us {name}"] = _rival(rival)
    return report


def _compile(case: Case, device: torch.device) -> None:
    # What does not compile is reported when it is measured, and must not keep the others from compiling.
    with contextlib.suppress(Exception):
        case.launch(device)


def _rival(run: Any) -> float | str:
    try:
        return round(microseconds([run]), 2)
    except Exception as error:  # another library's kernel that does not run here is a fact to report
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {error}"[:200]


def line(report: dict[str, Any]) -> str:
    """A row of the table for people."""
    if "failed" in report:
        return f"{report['kernel']:<26} {report['shape']:<34} FAILED {report['failed']}"
    rivals = "  ".join(f"{key[3:]} {value}" for key, value in report.items() if key.startswith("us "))
    error = f"{report['relative_error']:.1e}" if "relative_error" in report else "-"
    return (
        f"{report['kernel']:<26} {report['shape']:<34} {report['us']:>9.2f} us {report['tb_s']:>6.2f} TB/s "
        f"{100 * report['of_copy']:>4.0f} % {report['tflop_s']:>6.0f} TFLOP/s {100 * report['of_matmul']:>3.0f} %  "
        f"error {error}  {rivals}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no case after so long on the device")
    parser.add_argument("--out", type=Path, help="directory for kernels.json")
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--no-precompile", action="store_true")
    options = parser.parse_args()
    chosen = [case for case in all_cases() if not options.only or any(text in case.name for text in options.only)]
    if options.list:
        sys.stdout.writelines(f"{case.name}\n" for case in chosen)
        return
    compiling = 0.0 if options.no_precompile else precompile([partial(_compile, case) for case in chosen])
    clock = Clock(options.seconds)
    recorder = Recorder(options.out / "kernels.json" if options.out else None, resume=options.resume)
    ceilings = measure_ceilings()
    head = {
        "compile_s": round(compiling, 1),
        "copy_tb_s": round(ceilings.copy * 1e-12, 3),
        "matmul_tflop_s": round(ceilings.matmul * 1e-12, 1),
    }
    recorder.note(**head)
    sys.stdout.write(json.dumps(head) + "\n")
    for case in chosen:
        if clock.over:
            sys.stdout.write(f"no time left for {case.name} and what follows\n")
            break
        if recorder.done({"kernel": case.kernel, "shape": case.shape}):
            continue
        try:
            report = measure(case, ceilings)
        except Exception as error:  # the other kernels' figures are still wanted
            report = {"kernel": case.kernel, "shape": case.shape, "failed": describe(error)}
        recorder.add(report)
        sys.stdout.write(line(report) + "\n")
        sys.stdout.flush()
        if "failed" in report:
            carry_on_or_start_again("benchmarks.kernels.all")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
