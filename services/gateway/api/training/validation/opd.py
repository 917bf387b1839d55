"""Distillation: every prompt leaves room for its completion, and no token id is outside the vocabulary."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.common.jobs import CHECKPOINT, OpdJob
from services.common.jobs.kinds.opd import check_read, data_completion
from services.gateway.api.training.validation.common import (
    asked_tokens,
    check_conversation,
    check_room,
    check_vocabulary,
    located,
    over,
)
from services.gateway.engines.pool import ServedModel


def check_opd(served: ServedModel, job: OpdJob) -> None:
    """See check_training_job."""
    if job.teacher == CHECKPOINT and not served.info.teacher:
        raise InvalidRequest(
            'teacher "checkpoint": the engines have no second model loaded; start them with TEMPER_TEACHER_MODEL set '
            'to the directory of a checkpoint with the same tokenizer, or choose "base" or a version "name@n"',
            param="teacher",
        )
    check_vocabulary(served, "stop_token_ids", job.stop_token_ids)
    for name, prompt in job.numbered_prompts():
        check_conversation(name, prompt.messages, prompt.tools, messages="messages")
        check_conversation(name, prompt.prompt, None, messages="prompt")
        check_vocabulary(served, f"{name}.prompt_token_ids", prompt.prompt_token_ids or ())
        check_vocabulary(served, f"{name}.completion_token_ids", prompt.completion_token_ids or ())
        with located(name):
            tokens = asked_tokens(served, job, prompt)
            completion = data_completion(served.codec, job, prompt, tokens)
        if job.teacher == CHECKPOINT and served.info.teacher_vocab_size:
            check_read(name, [*tokens, *completion], served.info.teacher_vocab_size)
        check_room(served, name, len(tokens), job.max_tokens)
        limit = served.info.max_train_tokens
        if limit and len(tokens) + len(completion) > limit:
            raise over(name, len(tokens) + len(completion), limit, "leave it out")
