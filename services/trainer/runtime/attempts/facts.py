"""Facts of a prepared job that the guard rails look at."""

from __future__ import annotations

import math

from services.common.jobs import DraftJob, GrpoJob, JobBase, OpdJob
from services.common.jobs.dry_runs.guard_rails import TrainingFacts
from services.common.jobs.kinds.dpo import DpoJob
from services.common.jobs.kinds.kto import KtoJob
from services.common.jobs.kinds.sft import SftJob
from services.trainer.jobs.adapter_run import TrainingRun
from services.trainer.jobs.base import JobRun

USUAL_BITS = 1.0
"""Bits that a token of a text tells a model that knows the language."""


def facts_of(
    spec: JobBase, run: JobRun, *, token_bits: float = USUAL_BITS, saturation: float | None = None
) -> TrainingFacts:
    """What is known of a job.

    Args:
        token_bits: bits that a trained token has for the policy which the job starts from.
        saturation: share of the data that it gets right.
    """
    rate, usual = run.settings["learning_rate"], run.defaults["learning_rate"]
    if not isinstance(run, TrainingRun):
        return TrainingFacts(rate, usual)
    lora, data = run.lora, run.data()
    sizes = [len(rewards) for rewards in data.rewards]
    if isinstance(spec, GrpoJob) and spec.generate is not None:
        sizes = [spec.generate.completions]
    counted = data.unit == "example" and not isinstance(spec, DraftJob)
    return TrainingFacts(
        rate,
        usual,
        alpha=None if lora is None else max(target.alpha for target in lora.targets.values()),
        scale=None if lora is None else max(target.scale for target in lora.targets.values()),
        parameters=None if lora is None else lora.num_parameters(),
        data_bits=bits_of(spec, run, token_bits),
        examples=len(data.units) if counted else None,
        epochs=run.settings.get("epochs") if counted else None,
        usual_epochs=run.defaults.get("epochs") if counted else None,
        group_size=min(sizes) if sizes else None,
        groups=len(data.rewards),
        groups_skipped=data.groups_skipped,
        saturation=saturation,
    )


def bits_of(spec: JobBase, run: TrainingRun, token_bits: float) -> float | None:
    """Information that the job has to learn, in bits: of texts that of their tokens, of a preference or a rollout at
    most one. None: nobody knows."""
    data = run.data()
    if isinstance(spec, SftJob):
        return token_bits * sum(document.num_trained for unit in data.units for document in unit)
    if isinstance(spec, DpoJob | KtoJob):
        return float(len(data.units))
    if isinstance(spec, GrpoJob):
        made = spec.generate
        if made is None:
            return float(sum(len(unit) for unit in data.units))
        return float(made.rounds * made.round_prompts * made.completions)
    if isinstance(spec, OpdJob):
        return token_bits * spec.rounds * spec.round_prompts * spec.max_tokens
    return None


def bits(nats: float) -> float:
    """Nats as bits."""
    return nats / math.log(2)
