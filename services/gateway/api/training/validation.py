"""Checks of a training job against the model that the engines serve: done at submission, so that a bad job never waits
in the queue. What depends on the kind of job is in its schema (JobBase.check_tokens)."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.common.jobs import JobBase, TrainingSpec
from services.common.jobs.base import ServedLimits
from services.common.jobs.token_checks import check_free
from services.gateway.engines.pool import ServedModel
from services.gateway.inference.prompts import check_template_kwargs


def check_training_job(served: ServedModel, job: TrainingSpec) -> None:
    """Tokenizes every example. Blocking: call it in a thread.

    Raises:
        InvalidRequest: the rank does not fit the engines, the layers are not the model's, or see JobBase.check_tokens.
    """
    info = served.info
    check_template_kwargs(job.chat_template_kwargs)
    highest = info.max_lora_rank
    if highest and "rank" in job.lora.model_fields_set and job.lora.rank > highest:
        raise InvalidRequest(
            f"lora.rank is {job.lora.rank} and the engines take at most {highest} (TEMPER_MAX_LORA_RANK): give a lower "
            "one",
            param="lora.rank",
        )
    _check_layers(served, job)
    check_free("chat_template_kwargs", job.chat_template_kwargs)
    job.check_tokens(
        ServedLimits(
            codec=served.codec,
            vocab_size=info.vocab_size,
            max_train_tokens=info.max_train_tokens,
            max_model_len=info.max_model_len,
            teacher=info.teacher,
            teacher_vocab_size=info.teacher_vocab_size,
        )
    )


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
