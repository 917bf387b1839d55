"""Seconds from starting a process to its first token: `python -m benchmarks.startup [--model DIR] [--quantization …]`.

Two fresh processes after one another with one cache directory, empty for the first: the second finds the compiled
kernels there. Without --model a random checkpoint of the 4B shape is written first. The engine is built as a pod builds
it, without gRPC, Redis and an object store. Prints one JSON line a start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any


class Stages:
    """What happened when, in seconds since the parent started the process."""

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self._at: list[tuple[str, float]] = []

    def done(self, stage: str) -> None:
        """A stage has ended now."""
        self._at.append((stage, time.time() - self._zero))

    def seconds(self) -> dict[str, float]:
        """Stage → its own seconds, and their sum as first_token."""
        table, before = {}, 0.0
        for stage, at in self._at:
            table[stage] = round(at - before, 3)
            before = at
        return table | {"first_token": round(before, 3)}


def child(model: Path, zero: float) -> None:
    """One start in this process; settings come from TEMPER_*."""
    stages = Stages(zero)
    stages.done("interpreter")
    from services.pod.preflight import read_settings, use_kernel_cache

    settings, _ = read_settings()
    settings = settings.model_copy(update={"model": model})
    use_kernel_cache(settings)
    import structlog
    import torch

    stages.done("import torch")

    from services.common.registry import AdapterRegistry
    from services.common.store import ObjectStore
    from services.engine.ports import Submission
    from services.engine.request import SamplingParams
    from services.engine.updates import SequenceUpdate
    from services.engine.wire import AdapterChoice
    from services.pod.engine import build_engine, use_threads

    stages.done("import the engine")
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        stages.done("CUDA context")

    def note(_: object, __: str, event: MutableMapping[str, Any]) -> Any:
        stages.done(f"until {event['event']!r}")
        raise structlog.DropEvent

    structlog.configure(processors=[note])
    use_threads(settings)
    engine = build_engine(settings, AdapterRegistry(ObjectStore(settings), settings.served_model_name), None)
    stages.done("rest of the build")
    answered = threading.Event()
    errors: list[str] = []

    def sink(updates: list[SequenceUpdate]) -> None:
        errors.extend(str(update.error) for update in updates if update.error is not None)
        if errors or any(update.token is not None for update in updates):
            answered.set()

    engine.loop.start()
    prompt = tuple(index % engine.description.vocab_size for index in range(512))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.loop.submit(Submission("first", prompt, sampling, AdapterChoice()), sink)
    answered.wait(300)
    stages.done("first token of 512")
    engine.loop.stop()
    report = {"device": engine.description.device, "errors": errors, **stages.seconds()}
    report["planned_gib"] = {name: round(count / 2**30, 3) for name, count in engine.memory.parts().items()}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        report["used_gib"] = round((total - free) / 2**30, 3)
        report["torch_peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
    sys.stdout.write(json.dumps(report) + "\n")


def start(model: Path, variables: dict[str, str]) -> dict[str, Any]:
    """One start in a fresh process.

    Raises:
        RuntimeError: it failed; its standard error was passed on.
    """
    command = [sys.executable, "-m", "benchmarks.startup", "--model", str(model), "--child", repr(time.time())]
    run = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode or not run.stdout:
        raise RuntimeError(f"the engine did not start (exit status {run.returncode})")
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    if report["errors"]:
        raise RuntimeError(report["errors"][0])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: a random checkpoint of the 4B shape")
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--quantization", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.model, options.child)
        return
    from benchmarks.environment import environment
    from benchmarks.random_checkpoint import config_of, write
    from cli.settings import inherited_environment

    with tempfile.TemporaryDirectory() as scratch:
        model = options.model
        if model is None:
            model = Path(scratch) / "model"
            began = time.perf_counter()
            write(model, config_of(options.shape))
            sys.stderr.write(f"checkpoint written in {time.perf_counter() - began:.0f} s\n")
        variables = inherited_environment() | {
            "TEMPER_CACHE_DIR": f"{scratch}/cache",
            "TEMPER_QUANTIZATION": options.quantization,
        }
        variables.pop("TRITON_CACHE_DIR", None)
        for name in ("empty cache", "second start"):
            report = {"start": name, "quantization": options.quantization, **start(model, variables), **environment()}
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
