"""Policy optimisation on scored rollouts: lengths, token ids, and whether there is anything to learn.

What a job samples itself is checked in `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoJob, check_spread
from services.common.jobs.kinds.rollouts import check_unmasked, rollout_tokens
from services.gateway.api.training.validation.common import (
    asked_tokens,
    check_conversation,
    check_vocabulary,
    located,
    over,
)
from services.gateway.api.training.validation.generate import check_generate
from services.gateway.engines.pool import ServedModel


def check_grpo(served: ServedModel, job: GrpoJob) -> None:
    """See check_training_job."""
    if job.generate is not None:
        check_generate(served, job, job.generate)
        return
    for index, group in enumerate(job.groups or ()):
        check_conversation(f"groups[{index}]", group.messages, group.tools, messages="messages")
        check_conversation(f"groups[{index}]", group.prompt, None, messages="prompt")
    if not isinstance(job.prompt, str):
        check_conversation("prompt", job.prompt, None, messages="messages")
    groups = job.scored_groups
    check_spread(groups)
    check_unmasked(groups, mask_truncated=job.mask_truncated)
    limit = served.info.max_train_tokens
    for name, prompt, completions in _parts(served, job):
        for index, completion in enumerate(completions):
            if job.max_completion_length is not None and completion > job.max_completion_length:
                raise InvalidRequest(
                    f"max_completion_length is {job.max_completion_length}, and {name}[{index}] has {completion} "
                    "tokens: give the max_tokens that the rollouts were sampled with",
                    param="max_completion_length",
                )
            if limit and prompt + completion > limit:
                raise over(f"{name}[{index}]", prompt + completion, limit, "leave it out")
            context = served.info.max_model_len
            if job.exact_forward and context and prompt + completion > context:
                raise InvalidRequest(
                    f"{name}[{index}] has {prompt + completion} tokens with its prompt, and exact_forward has the "
                    f"engine decode it, whose context is {context}: leave it out, or leave exact_forward out",
                    param=f"{name}[{index}]",
                )


def _parts(served: ServedModel, job: GrpoJob) -> Iterator[tuple[str, int, list[int]]]:
    """Field of the completions, tokens of their prompt, tokens of each."""
    simple = job.completions is not None
    for index, group in enumerate(job.scored_groups):
        name = f"groups[{index}]"
        field = "completions" if simple else f"{name}.completions"
        with located("prompt" if simple else name):
            prompt = asked_tokens(served, job, group)
        check_vocabulary(served, f"{name}.prompt_token_ids", group.prompt_token_ids or ())
        lengths = []
        for position, completion in enumerate(group.completions):
            check_vocabulary(served, f"{field}[{position}].token_ids", completion.token_ids or ())
            with located(f"{field}[{position}]"):
                lengths.append(len(rollout_tokens(served.codec, job, prompt, completion)))
        yield field, len(prompt), lengths
