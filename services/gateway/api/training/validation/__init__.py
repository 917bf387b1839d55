"""Checks of a training job that need the tokenizer: done at submission, so that a bad job never waits in the queue.

The trainer counts again with its own masks; here the tokens of each example are counted without the end token, so a job
that is refused here would be refused there as well. One module a method.
"""

from __future__ import annotations

from typing import assert_never

from services.common.errors import InvalidRequest
from services.common.jobs import DpoJob, GrpoJob, JobBase, KtoJob, OpdJob, SftJob, TrainingSpec
from services.gateway.api.training.validation.common import check_free
from services.gateway.api.training.validation.dpo import check_dpo
from services.gateway.api.training.validation.grpo import check_grpo
from services.gateway.api.training.validation.kto import check_kto
from services.gateway.api.training.validation.opd import check_opd
from services.gateway.api.training.validation.sft import check_sft
from services.gateway.engines.pool import ServedModel
from services.gateway.inference.prompts import check_template_kwargs


def check_training_job(served: ServedModel, job: TrainingSpec) -> None:
    """Tokenizes every example. Blocking: call it in a thread.

    Raises:
        InvalidRequest: the rank does not fit the engines, an example is over the limit and the job's policy is to
            refuse, nothing is left to train on, a token id is outside the vocabulary, or the chat template refuses a
            conversation.
    """
    _check_shared(served, job)
    match job:
        case SftJob():
            check_sft(served, job)
        case DpoJob():
            check_dpo(served, job)
        case KtoJob():
            check_kto(served, job)
        case GrpoJob():
            check_grpo(served, job)
        case OpdJob():
            check_opd(served, job)
        case _:
            assert_never(job)


def _check_shared(served: ServedModel, job: JobBase) -> None:
    check_template_kwargs(job.chat_template_kwargs)
    highest = served.info.max_lora_rank
    if highest and "rank" in job.lora.model_fields_set and job.lora.rank > highest:
        raise InvalidRequest(
            f"lora.rank is {job.lora.rank} and the engines take at most {highest} (TEMPER_MAX_LORA_RANK): give a lower "
            "one",
            param="lora.rank",
        )
    _check_layers(served, job)
    check_free("chat_template_kwargs", job.chat_template_kwargs)


def _check_layers(served: ServedModel, job: JobBase) -> None:
    """The linear layers that an adapter is to change are layers of this model; engines of earlier releases do not say
    which there are."""
    layers = set(served.info.linear_layers)
    asked = job.lora.target_modules
    if not layers or asked is None or isinstance(asked, str):
        return
    last = {path.rsplit(".", 1)[1] for path in layers}
    if unknown := sorted({name for name in asked if name not in layers and name not in last}):
        raise InvalidRequest(
            f"lora.target_modules: {', '.join(unknown[:5])} is no linear layer of this model: choose from "
            f"{', '.join(sorted(last))}, from the paths of its layers (such as {min(layers)}), or leave it out for all",
            param="lora.target_modules",
        )
