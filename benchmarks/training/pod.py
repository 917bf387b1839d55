"""Parts that benchmarks of training jobs share: checkpoints, a pod without its servers, steps of a job with their
parts."""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.lib.adapters import GeneratedAdapters
from benchmarks.lib.environment import environment
from benchmarks.lib.in_process import settings_for
from benchmarks.lib.random_checkpoint import SHAPES, TINY, config_of, write
from benchmarks.lib.recorder import put_line
from services.common.adapters.registry import AdapterRegistry
from services.engine.models.registry import read_config
from services.engine.observability.events import EventStream
from services.pod.engine import Engine, build_engine, tune_interpreter, use_threads
from services.pod.host import PodHost
from services.pod.training.thread import pod_host
from services.trainer.jobs.base import JobRun
from services.trainer.settings import TrainerSettings
from services.trainer.timers import Part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of checkpoints() and report_to()."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--shape",
        choices=("qwen3.5", "tiny"),
        default="qwen3.5",
        help=f"qwen3.5: {' teaches '.join(sorted(SHAPES, reverse=True))}",
    )
    parser.add_argument("--student", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--teacher", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--scratch", type=Path, help="where random checkpoints are written, 10 GB; default: /tmp")
    parser.add_argument("--out", type=Path, help="append each line to this file")


@contextmanager
def checkpoints(options: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Directories of the student and the teacher, written for as long as the block runs where none are named: random
    weights that find each token about as likely as any, so that samples differ and so do teacher and student."""
    if options.student is not None and options.teacher is not None:
        yield options.student, options.teacher
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        student, teacher = Path(scratch, "student"), Path(scratch, "teacher")
        if options.shape == "tiny":
            data = json.loads((TINY / "config.json").read_text())
            write(teacher, data | {"hidden_size": 2 * data["hidden_size"]}, 1)
            yield options.student or TINY, options.teacher or teacher
            return
        if options.student is None:
            write(student, config_of("qwen3.5-0.8b"))
        if options.teacher is None:
            write(teacher, config_of("qwen3.5-4b"), 1)
        yield options.student or student, options.teacher or teacher


def report_to(options: argparse.Namespace, **facts: Any) -> Callable[[Mapping[str, Any]], None]:
    """Prints a result as a JSON line, with what it depends on, and appends it to ``options.out``."""
    shared = {"shape": options.shape, "device": options.device} | facts | environment()

    def report(line: Mapping[str, Any]) -> None:
        put_line({**line, **shared}, options.out)

    return report


@dataclass(frozen=True, slots=True)
class TrainingPod:
    """A running engine as its trainer sees it."""

    engine: Engine
    host: PodHost
    registry: AdapterRegistry


@contextmanager
def training_pod(
    model: Path,
    device: str,
    registry: AdapterRegistry | None = None,
    *,
    trainer: TrainerSettings | None = None,
    events: EventStream | None = None,
    **settings: object,
) -> Iterator[TrainingPod]:
    """The engine that a pod builds with these settings, without gRPC, Redis and an object store.

    Args:
        registry: None: there are no adapters but those in training.
        trainer: settings of the trainer; None: as they are without any.
        events: told what the engine does.
    """
    chosen = settings_for(model, device, **settings)
    use_threads(chosen.torch_threads)
    registry = registry or GeneratedAdapters(read_config(model), count=0, rank=1)
    engine = build_engine(chosen, registry, None, events)
    tune_interpreter()
    engine.start()
    try:
        yield TrainingPod(engine, pod_host(chosen, trainer or TrainerSettings(), engine), registry)
    finally:
        engine.stop()


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a job, one after the other."""

    seconds: list[float]
    """Wall time of each, the device waited for."""
    history: list[dict[str, float]]
    """Their metrics."""
    peak_gb: float
    """The most that was allocated on the GPU, 10⁹ bytes, all of the engine included; on a CPU of this process."""

    def figures(self) -> dict[str, Any]:
        """Medians: of a step, and of each of its parts. ``other`` is what is in none of them."""
        parts = [with_rest(*step) for step in zip(self.seconds, map(parts_of, self.history), strict=True)]
        return {
            "step_seconds": round(statistics.median(self.seconds), 4),
            "slowest_seconds": round(max(self.seconds), 4),
            "parts": medians(parts),
            "peak_gb": round(self.peak_gb, 2),
            "steps": len(self.seconds),
        }

    def mean(self, metric: str) -> float:
        return statistics.fmean(step[metric] for step in self.history)


def parts_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part of a step, in the order of their course."""
    return {name: metrics[f"{name}_seconds"] for name in get_args(Part) if f"{name}_seconds" in metrics}


def with_rest(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    """The parts, and as ``other`` what they leave."""
    return {**parts, "other": whole - sum(parts.values())}


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each name over all rows; nothing where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(statistics.median(row.get(name, 0.0) for row in rows), 4) for name in names}


def timed_step(host: PodHost, run: JobRun, index: int) -> tuple[float, dict[str, float]]:
    """Wall time of a step, from sampling to the applied update with the device waited for, and its metrics."""
    began = time.perf_counter()
    metrics = run.step(index)
    if host.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, metrics


def measure_steps(host: PodHost, run: JobRun, warm_up: int) -> Steps:
    """All steps of a prepared job; the first ``warm_up`` do not count."""
    seconds: list[float] = []
    history: list[dict[str, float]] = []
    for index in range(run.total_steps):
        if index == warm_up:
            forget_peak(host)
        took, metrics = timed_step(host, run, index)
        if index >= warm_up:
            seconds.append(took)
            history.append(metrics)
    return Steps(seconds, history, peak_gb(host))


def end_job(host: PodHost) -> None:
    """Ends a job as the trainer's worker does: the next one finds the memory of this one free. Nothing of its run may
    be held any more."""
    host.memory_budget.release_job()
    gc.collect()
    host.memory_budget.settle()


def forget_peak(host: PodHost) -> None:
    """Resets the peak that peak_gb() reads, where the device can."""
    if host.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gb(host: PodHost) -> float:
    """See Steps."""
    if host.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
