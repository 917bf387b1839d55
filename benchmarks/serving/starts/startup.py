"""Seconds from starting a process to its first token: `python -m benchmarks.serving.starts.startup [--model DIR]
[--quantization …]`.

Two fresh processes after one another with one cache directory, empty for the first: the second finds the compiled
kernels there. On a GPU a third has an empty one, and an archive of them, as on a card that the image knows. Without
--model a random checkpoint of the 4B shape is written first. The engine is built as a pod builds it, without gRPC,
Redis and an object store. Prints one JSON line a start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.stages import Stages

_FIRST_TOKEN_SECONDS = 120.0


def child(model: Path, zero: float) -> None:
    """Measures one start in this process; settings come from TEMPER_*."""
    stages = Stages(zero)
    stages.done("interpreter")
    from services.pod.preflight import read_settings, use_kernel_cache

    settings, _ = read_settings()
    settings = settings.model_copy(update={"model": model})
    use_kernel_cache(settings)
    import torch

    stages.done("import torch")

    from services.common.adapters.registry import AdapterRegistry
    from services.common.storage.object_store import ObjectStore
    from services.engine.requests.adapter import AdapterChoice
    from services.engine.requests.outputs import SequenceUpdate
    from services.engine.requests.sampling_params import SamplingParams
    from services.engine.requests.submission import Submission
    from services.pod.engine import build_engine, use_threads

    stages.done("import the engine")
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        stages.done("CUDA context")

    stages.listen()
    use_threads(settings.torch_threads)
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
    if not answered.wait(_FIRST_TOKEN_SECONDS):
        errors.append(f"no token after {_FIRST_TOKEN_SECONDS:.0f} s")
    stages.done("first token of 512")
    engine.loop.stop()
    report = {"device": engine.description.device, "errors": errors, **stages.seconds(), "first_token": stages.total()}
    report["planned_gib"] = {name: round(count / 2**30, 3) for name, count in engine.memory.parts().items()}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        report["used_gib"] = round((total - free) / 2**30, 3)
        report["torch_peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
    sys.stdout.write(json.dumps(report) + "\n")


def start(model: Path, variables: dict[str, str], seconds: float) -> dict[str, Any]:
    """Measures one start in a fresh process.

    Args:
        seconds: it may take.

    Raises:
        RuntimeError: it failed; its standard error was passed on.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving.starts.startup",
        "--model",
        str(model),
        "--child",
        repr(time.time()),
    ]
    try:
        run = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the engine did not start in {seconds:.0f} s") from error
    reports = [line for line in run.stdout.splitlines() if line.startswith('{"device"')]
    if run.returncode or not reports:
        raise RuntimeError(f"the engine did not start (exit status {run.returncode})")
    report: dict[str, Any] = json.loads(reports[-1])
    if report["errors"]:
        raise RuntimeError(report["errors"][0])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: a random checkpoint of the 4B shape")
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--quantization", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--seconds", type=float, default=500.0, help="for both starts")
    parser.add_argument("--out", type=Path, help="file to append a line a start to")
    parser.add_argument("--scratch", type=Path, help="where checkpoint and cache are written; default: the system's")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.model, options.child)
        return
    from benchmarks.lib.environment import environment
    from benchmarks.lib.random_checkpoint import config_of, write
    from benchmarks.lib.recorder import put_line
    from cli.settings import inherited_environment
    from services.engine.executors.kernel_archive import pack

    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
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
        end = time.monotonic() + options.seconds
        report: dict[str, Any] = {}
        for name in ("empty cache", "second start", "empty cache, archive"):
            if name.endswith("archive"):
                if report.get("device") == "cpu" or "failed" in report:
                    break
                archives = Path(scratch) / "archives"
                archives.mkdir()
                pack(Path(scratch) / "cache" / "triton", archives)
                variables |= {"TEMPER_CACHE_DIR": f"{scratch}/fresh", "TEMPER_KERNEL_ARCHIVES": str(archives)}
            report = {"start": name, "quantization": options.quantization}
            try:
                report |= start(model, variables, max(1.0, end - time.monotonic()))
            except RuntimeError as error:  # the second start goes on where the first one stopped
                report["failed"] = str(error)
            put_line(report | environment(), options.out)


if __name__ == "__main__":
    main()
