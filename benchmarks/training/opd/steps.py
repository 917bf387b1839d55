"""Steps of on-policy distillation: `python -m benchmarks.training.opd --workloads gkd,real`.

A teacher of one shape and a student of another, random weights unless --teacher and --student name checkpoints; rank
16 on q and v; lambda 1, beta 0. Everything is what a pod does for an `opd` job: the engine samples by the adapter in a
slot, the teacher reads, the student's forward and backward, AdamW.

- gkd: 32 prompts of 4 to 8 tokens, one a step, 8 new tokens, greedy
- real: 8 prompts of 512 tokens a step, 256 new tokens, temperature 1

`--device cpu --shape tiny` runs the same on the tiny model, with shorter prompts for real. One JSON line a workload,
written to --out as it comes:

- step_seconds: median wall time of a step, from sampling to the applied update, the device waited for
- parts: median seconds of swap (the policy into its slot), rollout, teacher, forward (with the divergence), backward,
  optimizer, and other: what is in none of them
- peak_gb: the most that was allocated on the GPU, 10⁹ bytes, all of the engine included; on a CPU of this process
- completion_length_mean, loss: of the measured steps

`--trl` runs TRL's GKDTrainer on the same two checkpoints, where its package is importable, and adds a line of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.in_process import only_warnings
from benchmarks.training.opd.trl import check_importable, measure_trl
from benchmarks.training.opd.workloads import MODULES, RANK, WORKLOADS, Workload
from benchmarks.training.pod import add_arguments, checkpoints, end_job, measure_steps, report_to, training_pod
from services.common.jobs import OpdJob
from services.pod.host import PodHost
from services.trainer.jobs.opd import OpdRun


@contextmanager
def pod(student: Path, teacher: Path, device: str, longest: int) -> Iterator[PodHost]:
    """A running engine with both models."""
    with training_pod(
        student,
        device,
        teacher_model=teacher,
        max_num_seqs=16,
        max_lora_rank=RANK,
        max_train_tokens=max(512, longest),
        prefix_cache=False,
    ) as made:
        yield made.host


def measure(host: PodHost, workload: Workload, steps: int, warm_up: int) -> dict[str, Any]:
    """One workload, in the fields above."""
    vocab = min(host.codec.vocab_size, host.model.config.vocab_size)
    spec = OpdJob.model_validate(
        {
            "adapter": "benchmark",
            "teacher": "checkpoint",
            "prompts": [{"prompt_token_ids": prompt} for prompt in workload.make_prompts(vocab)],
            "rounds": steps + warm_up,
            "prompts_per_round": workload.per_step,
            "max_tokens": workload.new_tokens,
            "sampling_temperature": workload.sampling_temperature,
            "beta": 0.0,
            "learning_rate": 1e-4,
            "lora": {"rank": RANK, "alpha": 2.0 * RANK, "target_modules": MODULES},
        }
    )
    run = OpdRun.prepare(spec, host, None)
    steps_taken = measure_steps(host, run, warm_up)
    first, last = steps_taken.history[0], steps_taken.history[-1]
    return {
        "workload": workload.name,
        "by": "temper",
        **steps_taken.figures(),
        "completion_length_mean": round(steps_taken.mean("completion_length_mean"), 1),
        "loss": [round(step["loss"], 4) for step in (first, last)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="gkd,real", help=f"any of {','.join(WORKLOADS)}")
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=16, help="measured")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them: compiled kernels, captured graphs")
    parser.add_argument("--trl", action="store_true", help="TRL's GKDTrainer, too")
    options = parser.parse_args()
    chosen = [WORKLOADS[name] for name in options.workloads.split(",")]
    if options.shape == "tiny":
        chosen = [workload.on_the_tiny_model() for workload in chosen]
    if options.trl:
        check_importable()
    only_warnings()
    report = report_to(options)
    with checkpoints(options) as (student, teacher):
        longest = max(workload.longest + workload.new_tokens for workload in chosen)
        with pod(student, teacher, options.device, longest) as host:
            for workload in chosen:
                report(measure(host, workload, options.steps, options.warm_up))
                end_job(host)
        if options.trl:
            torch.cuda.empty_cache()
            for workload in chosen:
                report(measure_trl(student, teacher, options.device, workload, options.steps, options.warm_up))
