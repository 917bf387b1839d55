"""Small jobs together and one by one: `python -m benchmarks.training.small_jobs --jobs 20 --tokens 256`.

Prepared sft jobs as a pod runs them, on an engine that is otherwise idle: each an adapter of rank 16 on all linear
layers and one example, which is its only step unless --steps says otherwise. Qwen3.5-4B's shape with random weights;
`--device cpu --shape tiny` is the tiny model. One JSON line a way, written to --out as it comes; of each way the median
of --repeats:

- way: alone, one job after another as a trainer runs them with TEMPER_TRAINER_JOBS_A_STEP=1; or together
- steps_seconds: the optimizer steps of all jobs, examinations and preparation left out
- jobs_seconds: everything from parsed requests to the files of the versions: prepare, examine, steps, examine, files
- parts: seconds of jobs_seconds by what they went into
- tokens_per_second: tokens of all steps / steps_seconds
- forwards: training forwards of the steps
- peak_gb: as in benchmarks.training.methods

Claims, checkpoints, publication and loading into the engine are the same for both, and not in it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.lib.in_process import only_warnings
from benchmarks.training.methods import RANK, RandomText
from benchmarks.training.pod import (
    TrainingPod,
    add_arguments,
    checkpoints,
    forget_peak,
    peak_gb,
    report_to,
    training_pod,
)
from services.common.jobs import SftJob
from services.trainer.jobs import prepare_run
from services.trainer.jobs.passes import Course, Pass, SharedRun, complete, compute_together, shares


class Ways:
    """Both ways of training the same jobs.

    Args:
        specs: the jobs, as they come.
    """

    def __init__(self, pod: TrainingPod, specs: Sequence[SftJob]) -> None:
        self._pod, self._specs = pod, specs
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._forwards = 0

    def measure(self, way: str) -> dict[str, Any]:
        """Figures of one way, in the fields above."""
        self._seconds.clear()
        self._forwards = 0
        forget_peak(self._pod.host)
        tokens, losses = self._together() if way == "together" else self._alone()
        return {
            "steps_seconds": self._seconds["steps"],
            "jobs_seconds": sum(self._seconds.values()),
            "parts": dict(self._seconds),
            "tokens_per_second": tokens / self._seconds["steps"],
            "forwards": self._forwards,
            "peak_gb": peak_gb(self._pod.host),
            "loss": statistics.fmean(losses),
        }

    def _alone(self) -> tuple[int, list[float]]:
        tokens, losses = 0, []
        for spec in self._specs:
            run = self._prepared(spec, "alone")
            self._timed("examine", lambda run=run: complete(run.examining()))  # type: ignore[misc]
            for index in range(run.total_steps):
                found = self._timed("steps", lambda run=run, index=index: complete(run.stepping(index)))  # type: ignore[misc]
                self._forwards += 1
            self._timed("examine", lambda run=run: complete(run.examining()))  # type: ignore[misc]
            tokens += round(found["num_tokens"])
            losses.append(found["loss"])
            self._ended([run])
            del run
        return tokens, losses

    def _together(self) -> tuple[int, list[float]]:
        runs = [self._prepared(spec, str(number)) for number, spec in enumerate(self._specs)]
        if not self._pod.host.memory_budget.reserve_together(max(run.shared_working for run in runs)):
            raise SystemExit(
                f"the memory plan has no room for {len(runs)} jobs at a time: fewer --jobs, or more --train-memory"
            )
        self._timed("examine", lambda: self._computed([run.examining() for run in runs]))
        found: list[dict[str, float]] = []
        for index in range(runs[0].total_steps):
            found = self._timed("steps", lambda index=index: self._computed([run.stepping(index) for run in runs]))  # type: ignore[misc]
        self._timed("examine", lambda: self._computed([run.examining() for run in runs]))
        self._ended(runs)
        return sum(round(one["num_tokens"]) for one in found), [one["loss"] for one in found]

    def _computed(self, courses: Sequence[Course[dict[str, float]]]) -> list[dict[str, float]]:
        """Results of courses of one pass each."""
        passes = [next(course) for course in courses]
        entered = self._counted(passes)
        compute_together(passes, entered, lambda _: True)
        return [complete(course) for course in courses]

    def _counted(self, passes: Sequence[Pass]) -> Callable[[], None]:
        def pause() -> None:
            self._forwards += passes[0].trained

        return pause

    def _prepared(self, spec: SftJob, name: str) -> SharedRun:
        run = self._timed("prepare", lambda: prepare_run(spec, self._pod.host, None))
        if not shares(run):
            raise TypeError(f"a {spec.kind} job does not share its steps")
        self._pod.host.memory_budget.hold_job(name)
        return run

    def _ended(self, runs: list[SharedRun]) -> None:
        """Makes the files of the versions, and ends the jobs as the trainer's worker does."""
        self._timed("files", lambda: [run.files("base") for run in runs])
        budget = self._pod.host.memory_budget
        for name in ["alone", *map(str, range(len(self._specs)))]:
            budget.release_job(name)
        budget.release_together()
        runs.clear()
        gc.collect()
        budget.settle()

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        if self._pod.host.model.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[part] += time.perf_counter() - began
        return result


def jobs(pod: TrainingPod, count: int, tokens: int, steps: int, microbatch: int | None = None) -> list[SftJob]:
    """Jobs of one example of this many tokens, each of its own words.

    Args:
        microbatch: their max_tokens_per_microbatch; None: not given.
    """
    texts = RandomText(pod.host.codec)
    given = {} if microbatch is None else {"max_tokens_per_microbatch": microbatch}
    return [
        SftJob.model_validate(
            {
                "adapter": f"a{number}",
                "examples": [{"prompt": texts.text(tokens // 2), "completion": texts.text(tokens - tokens // 2)}],
                "epochs": steps,
                "batch_size": 1,
                "learning_rate": 1e-4,
                "lora": {"rank": RANK, "alpha": 2.0 * RANK, "seed": number},
                "prompt_format": "raw",
                **given,
            }
        )
        for number in range(count)
    ]


def medians(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median of each figure over repeats."""
    line: dict[str, Any] = {}
    for name, value in found[0].items():
        if isinstance(value, dict):
            line[name] = medians([one[name] for one in found])
        else:
            line[name] = round(statistics.median(one[name] for one in found), 4)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each job's example")
    parser.add_argument("--steps", type=int, default=1, help="steps of each job, all on its example")
    parser.add_argument("--ways", default="alone,together", help="either or both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--microbatch", type=int, help="the jobs' max_tokens_per_microbatch; default: not given")
    parser.add_argument("--train-memory", default="0", help="memory of training, e.g. 40GiB; 0: the plan's")
    add_arguments(parser)
    options = parser.parse_args()
    only_warnings()
    sizes = {name: getattr(options, name) for name in ("jobs", "tokens", "steps", "microbatch")}
    report = report_to(options, **sizes, rank=RANK)
    with checkpoints(options) as (student, teacher):
        model = student if options.shape == "tiny" else teacher
        with training_pod(
            model,
            options.device,
            max_lora_rank=RANK,
            max_num_seqs=8,
            max_train_tokens=options.tokens + 8,
            train_memory_bytes=options.train_memory,
        ) as pod:
            specs = jobs(pod, options.jobs, options.tokens, options.steps, options.microbatch)
            for way in options.ways.split(","):
                Ways(pod, specs[:2]).measure(way)  # compiles
                report({"way": way} | medians([Ways(pod, specs).measure(way) for _ in range(options.repeats)]))


if __name__ == "__main__":
    main()
