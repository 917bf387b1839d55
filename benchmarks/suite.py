"""Everything README.md says of a GPU, measured again: `python -m benchmarks.suite --out DIR [SECTION ...]`.

Without names all sections run, one after the other, each in processes of its own that end in time. Figures go to DIR
as the benchmarks write them, what they print to DIR/SECTION.log. `--list` shows the sections and their commands.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_MODEL = "--model qwen3.5-4b --random"
_TABLE = "1x512x128,8x512x128,64x512x256,16x4096x256,256x512x256"
_BENCH = "{python} -m benchmarks"
# A line a test: a run that is cut off leaves the names of those that failed.
_PYTEST = "{python} -m pytest -vv --tb=short -p no:cacheprovider"
_DEATH_SECONDS = 60.0
_STEPS = f"{_BENCH}.training.steps --out {{out}}/training.jsonl"
_SANITIZER = "compute-sanitizer --target-processes all --error-exitcode 1 --tool"


@dataclass(frozen=True, slots=True)
class Section:
    """Commands that follow each other: {python} is this interpreter, {out} the directory for figures."""

    name: str
    seconds: float
    """For all of its commands, at most."""
    commands: tuple[str, ...]


def _serving(name: str, seconds: float, arguments: str) -> Section:
    return Section(name, seconds, (f"{_BENCH}.serving.rates {_MODEL} {arguments} --out {{out}}",))


SECTIONS = (
    Section("kernel-tests", 400, (f"{_PYTEST} -n 12 tests/kernels",)),
    # Those of the fused forward run on whatever there is, a GPU included.
    Section(
        "parity",
        500,
        (f"{_PYTEST} -n 4 -m cuda tests/parity", f"{_PYTEST} -n 4 -m 'not cuda' tests/parity/test_fused.py"),
    ),
    # Behind the tests, which compile what is checked here.
    Section("memcheck", 600, (f"{_SANITIZER} memcheck {_PYTEST} -n 12 --timeout 600 tests/kernels/gpu",)),
    Section("racecheck", 600, (f"{_SANITIZER} racecheck {_PYTEST} -n 12 --timeout 600 tests/kernels/gpu",)),
    _serving("base", 200, f"--cases {_TABLE}"),
    _serving("lora", 200, "--cases 1x512x128,8x512x128,64x512x256 --lora 8"),
    _serving("fp8", 150, "--cases 1x512x128,64x512x256 --quant fp8"),
    _serving("int4", 150, "--cases 1x512x128,8x512x128 --quant int4"),
    _serving("smaller", 150, "--cases 64x512x256,16x4096x256,256x512x256 --kv fp8 --state bfloat16"),
    _serving("mixed", 250, "--cases 16x4096x256,64x512x256,256x512x256 --mixed 1792,2048,3840,4096,8192"),
    _serving("mixed-lora", 200, "--cases 64x512x256 --lora 8 --mixed 1792,2048,3840,4096,8192"),
    _serving("mixed-fp8", 200, "--cases 64x512x256 --quant fp8 --mixed 1792,2048,3840,4096,8192"),
    _serving("context", 200, "--cases 8x1024x128,8x4096x128,8x16384x128,8x32000x128,1x131072x64"),
    _serving("swaps", 400, "--cases 64x512x512 --lora 8 --swaps 1000"),
    _serving("timeline", 200, "--cases 1x512x128,64x512x256,256x512x256 --profile {out}/timeline.json.gz"),
    _serving("speculation", 200, "--cases 1x512x128,8x512x128 --set speculative=mtp --acceptance 0.8"),
    # 0.895 of seven draft tokens: 5.6 tokens of an answer a step.
    _serving("block", 300, "--cases 1x512x256,8x512x256 --block 8 --acceptance 0.895"),
    _serving("invariant", 200, "--cases 1x512x128,64x512x256 --batch-invariant"),
    Section(
        "prompts-float8",
        400,
        tuple(
            f"{_BENCH}.serving.rates {_MODEL} --cases 16x4096x256,64x512x256 --prefill-float8 {choice} --out {{out}}"
            for choice in ("none", "mlp", "all")
        ),
    ),
    Section("multiturn", 400, (f"{_BENCH}.prefix_cache.multiturn {_MODEL} --out {{out}}/multiturn.jsonl",)),
    Section("prefix-noise", 400, (f"{_BENCH}.prefix_cache.noise {_MODEL} --out {{out}}/prefix-noise.jsonl",)),
    Section(
        "http", 300, (f"{_BENCH}.gateway.http.rates --model qwen3.5-4b --cases 1x512x128,64x512x256 --out {{out}}",)
    ),
    # Needs no GPU: its cost model comes from the results of others.
    Section("fleet", 3600, (f"{_BENCH}.fleet --out {{out}}", f"{_BENCH}.fleet --plot {{out}}/fleet.jsonl")),
    Section("startup", 200, (f"{_BENCH}.serving.starts.startup --out {{out}}/startup.jsonl",)),
    Section(
        "accuracy",
        300,
        (
            f"{_BENCH}.quality.accuracy --quantization none fp8 int4 --out {{out}}/accuracy.json",
            f"{_BENCH}.quality.rounding.quantization --engine --layers 8 --modes bf16 fp8 int4 "
            "--json {out}/quality.json",
        ),
    ),
    Section("kernels", 400, (f"{_BENCH}.kernels.all --out {{out}}",)),
    Section("prefix-device", 150, (f"{_BENCH}.prefix_cache.device --out {{out}}/prefix-device.jsonl",)),
    Section("delta", 60, (f"{_BENCH}.tuning.probe_delta --out {{out}}/delta.json",)),
    Section(
        "training",
        500,
        (
            f"{_STEPS} --cases 1x512,4x2048,1x8192 --recompute none,selective,full",
            f"{_STEPS} --cases 4x2048,1x8192 --recompute selective --float8",
            f"{_STEPS} --cases 1x32768,1x131072 --recompute full --repeats 1",
        ),
    ),
    Section(
        "small-jobs",
        200,
        (f"{_BENCH}.training.small_jobs --jobs 20 --tokens 256 --microbatch 8192 --out {{out}}/small-jobs.jsonl",),
    ),
    Section("backward", 300, (f"{_BENCH}.tuning.attention.backward --out {{out}}/backward.jsonl",)),
    Section("pieces", 150, (f"{_BENCH}.tuning.sweep_pieces --out {{out}}/pieces.json",)),
)


def run(section: Section, out: Path) -> bool:
    """Runs a section's commands until one fails or their time is over; whether all succeeded."""
    end = time.monotonic() + section.seconds
    with (out / f"{section.name}.log").open("w") as log:
        for command in section.commands:
            arguments = shlex.split(command.format(python=shlex.quote(sys.executable), out=shlex.quote(str(out))))
            try:
                process = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)
            except OSError as error:
                log.write(f"{error}\n")
                return False
            try:
                if process.wait(max(1.0, end - time.monotonic())) != 0:
                    return False
            except subprocess.TimeoutExpired:
                log.write(f"\nended after {section.seconds:.0f} s: {command}\n")
                return False
            finally:
                # Workers of a test run or servers of a benchmark outlive a process that was killed.
                _end_group(process)
    return True


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a group and waits for all of it: what a kill has not reached yet still holds GPU memory and cores.

    Raises:
        RuntimeError: a process outlived that by a minute, so that nothing measured beside it would be true.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + _DEATH_SECONDS
    while alive := _living(process.pid):
        if time.monotonic() > end:
            raise RuntimeError(f"processes {alive} run {_DEATH_SECONDS:.0f} s after they were killed")
        time.sleep(0.01)


def _living(group: int) -> list[int]:
    """Process ids of a group. Zombies are dead: whoever adopted them may not ask for their status."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {section.name: section for section in SECTIONS}
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(known))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no section after this")
    parser.add_argument("--list", action="store_true", help="only print the sections")
    options = parser.parse_args()
    unknown = [name for name in options.sections if name not in known]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.sections] or list(SECTIONS)
    if options.list:
        for section in chosen:
            print(f"{section.name} (at most {section.seconds:.0f} s)", *section.commands, sep="\n    ")
        return
    if options.out is None:
        parser.error("--out says where the figures go")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    failed: list[str] = []
    for section in chosen:
        if time.monotonic() - began > options.seconds:
            print(f"{section.name}: no time left", flush=True)
            failed.append(section.name)
            continue
        started = time.monotonic()
        if not run(section, options.out):
            failed.append(section.name)
        outcome = f"failed, see {section.name}.log" if section.name in failed else "done"
        print(f"{section.name}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
