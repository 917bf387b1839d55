"""Rollouts that a job samples itself: every prompt leaves room for its completion, and every reward can be computed."""

from __future__ import annotations

from services.common.jobs import GrpoJob
from services.common.jobs.kinds.generate import GenerateSettings, check_rewards
from services.gateway.api.training.validation.common import (
    asked_tokens,
    check_conversation,
    check_room,
    check_vocabulary,
    located,
)
from services.gateway.engines.pool import ServedModel


def check_generate(served: ServedModel, job: GrpoJob, settings: GenerateSettings) -> None:
    """See check_training_job."""
    check_vocabulary(served, "generate.stop_token_ids", settings.stop_token_ids)
    for field, prompts in (("prompts", settings.prompts), ("eval_prompts", settings.eval_prompts)):
        for index, prompt in enumerate(prompts):
            name = f"generate.{field}[{index}]"
            check_conversation(name, prompt.messages, prompt.tools, messages="messages")
            check_conversation(name, prompt.prompt, None, messages="prompt")
            check_vocabulary(served, f"{name}.prompt_token_ids", prompt.prompt_token_ids or ())
            with located(name):
                tokens = asked_tokens(served, job, prompt)
            check_room(served, name, len(tokens), settings.max_tokens)
    check_rewards(settings)
