"""Checks of a training job that need the tokenizer: done at submission, so that a bad job never waits in the queue.

The trainer counts again with its own masks; here the tokens of each example are counted without the end token, so a job
that is refused here would be refused there as well. One module a method.
"""

from __future__ import annotations

from typing import assert_never

from services.common.errors import InvalidRequest
from services.common.jobs import DpoJob, GrpoJob, JobBase, KtoJob, OpdJob, SftJob, TrainingSpec
from services.gateway.engines import ServedModel
from services.gateway.prompts import check_template_kwargs
from services.gateway.training_limits.common import check_free
from services.gateway.training_limits.dpo import check_dpo
from services.gateway.training_limits.grpo import check_grpo
from services.gateway.training_limits.kto import check_kto
from services.gateway.training_limits.opd import check_opd
from services.gateway.training_limits.sft import check_sft


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
            f"lora.rank is {job.lora.rank} and the engines take at most {highest} (TEMPER_MAX_LORA_RANK)",
            param="lora.rank",
        )
    check_free("chat_template_kwargs", job.chat_template_kwargs)
