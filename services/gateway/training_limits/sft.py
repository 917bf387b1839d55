"""Supervised fine-tuning: every example within the limit, or its policy."""

from __future__ import annotations

from services.common.jobs import SftExample, SftJob
from services.gateway.engines import ServedModel
from services.gateway.training_limits.common import check_conversation, check_examples, prompt_tokens, turns_of


def check_sft(served: ServedModel, job: SftJob) -> None:
    """See check_training_job."""
    for name, example in job.numbered_examples():
        check_conversation(name, example.messages, example.tools, messages="messages")
        check_conversation(name, example.prompt, None, messages="prompt")
    check_examples(
        served,
        job,
        lambda example: _tokens(served, job, example),
        overlong=job.overlong,
        way_out="shorten it, or choose overlong 'drop' or 'truncate'",
    )


def _tokens(served: ServedModel, job: SftJob, example: SftExample) -> int:
    if example.text is not None:
        return len(served.codec.encode(example.text))
    if example.messages is not None:
        options = job.chat_template_kwargs
        turns = turns_of(example.messages)
        # Up to two tokens behind the last turn are the template's (its end and a newline), not the example's.
        tokens = served.codec.encode_chat(turns, tools=example.tools, add_generation_prompt=False, **options)
        return max(1, len(tokens) - 2)
    prompt = prompt_tokens(served, job, example.prompt or "", example.tools)
    return prompt + len(served.codec.encode_completion(example.completion or ""))
