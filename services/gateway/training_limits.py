"""Checks of a training job that need the tokenizer: done at submission, so that a bad job never waits in the queue.

The trainer counts again with its own masks; here the tokens of each example are counted without the end token, so a job
that is refused here would be refused there as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoGroup, GrpoJob, JobBase, Message, SftExample, SftJob
from services.gateway.engines import ServedModel
from services.gateway.prompts import check_template_kwargs
from services.gateway.schemas.base import check_finite


def check_training_job(served: ServedModel, job: SftJob | GrpoJob) -> None:
    """Tokenizes every example. Blocking: call it in a thread.

    Raises:
        InvalidRequest: the rank does not fit the engines, an example is over the limit and the job's policy is to
            refuse, nothing is left to train on, a token id is outside the vocabulary, or the chat template refuses a
            conversation.
    """
    check_template_kwargs(job.chat_template_kwargs)
    highest = served.info.max_lora_rank
    if highest and "rank" in job.lora.model_fields_set and job.lora.rank > highest:
        raise InvalidRequest(
            f"lora.rank is {job.lora.rank} and the engines take at most {highest} (TEMPER_MAX_LORA_RANK)",
            param="lora.rank",
        )
    for name, value in _free_parts(job):
        try:
            check_finite(value)
        except ValueError as error:
            raise InvalidRequest(f"{name}: {error}", param=name) from error
    if isinstance(job, SftJob):
        _check_sft(served, job)
    else:
        _check_grpo(served, job)


def _free_parts(job: SftJob | GrpoJob) -> Iterator[tuple[str, Any]]:
    """The parts that the job's schema does not look into."""
    yield "chat_template_kwargs", job.chat_template_kwargs
    if isinstance(job, SftJob):
        for field, examples in (("examples", job.examples), ("eval_examples", job.eval_examples)):
            for index, example in enumerate(examples):
                yield f"{field}[{index}].tools", example.tools
                for message in example.messages or ():
                    yield f"{field}[{index}].messages", message.tool_calls
    else:
        for index, group in enumerate(job.groups or ()):
            yield f"groups[{index}].tools", group.tools
            for message in group.messages or ():
                yield f"groups[{index}].messages", message.tool_calls


def _over(field: str, tokens: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"{field} has {tokens} tokens and the limit for training is {limit}: shorten it, or for SFT choose overlong "
        "'drop' or 'truncate'",
        param=field,
    )


def _check_sft(served: ServedModel, job: SftJob) -> None:
    limit = served.info.max_train_tokens
    kept = 0
    for field, examples in (("examples", job.examples), ("eval_examples", job.eval_examples)):
        for index, example in enumerate(examples):
            name = f"{field}[{index}]"
            tokens = _located(name, lambda example=example: _example_tokens(served, job, example))
            if not limit or tokens <= limit or job.overlong == "truncate":
                kept += field == "examples"
            elif job.overlong == "error":
                raise _over(name, tokens, limit)
    if kept == 0:
        raise InvalidRequest(f"every example is over the limit of {limit} tokens and dropped", param="examples")


def _check_grpo(served: ServedModel, job: GrpoJob) -> None:
    limit = served.info.max_train_tokens
    for name, prompt, completions in _grpo_parts(served, job):
        for index, completion in enumerate(completions):
            if limit and prompt + completion > limit:
                raise _over(f"{name}[{index}]", prompt + completion, limit)


def _grpo_parts(served: ServedModel, job: GrpoJob) -> Iterator[tuple[str, int, list[int]]]:
    """Field of the completions, tokens of their prompt, tokens of each."""
    codec = served.codec
    if job.completions is not None and job.prompt is not None:
        prompt = _located("prompt", lambda: _prompt_tokens(served, job, job.prompt or ""))
        yield "completions", prompt, [len(codec.encode_completion(text)) for text in job.completions]
    for index, group in enumerate(job.groups or ()):
        name = f"groups[{index}]"
        prompt = _located(name, lambda group=group: _group_prompt(served, job, group))
        _check_vocabulary(served, f"{name}.prompt_token_ids", group.prompt_token_ids or ())
        lengths = []
        for position, completion in enumerate(group.completions):
            _check_vocabulary(served, f"{name}.completions[{position}].token_ids", completion.token_ids or ())
            if completion.token_ids is not None:
                lengths.append(len(completion.token_ids))
            else:
                lengths.append(len(codec.encode_completion(completion.text or "")))
        yield f"{name}.completions", prompt, lengths


def _located(field: str, count: Any) -> int:
    try:
        return int(count())
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", param=field) from error


def _check_vocabulary(served: ServedModel, field: str, token_ids: Sequence[int]) -> None:
    if token_ids and (largest := max(token_ids)) >= served.info.vocab_size:
        raise InvalidRequest(
            f"{field} contains the token id {largest}, the vocabulary has {served.info.vocab_size} tokens", param=field
        )


def _group_prompt(served: ServedModel, job: JobBase, group: GrpoGroup) -> int:
    if group.prompt_token_ids is not None:
        return len(group.prompt_token_ids)
    prompt = group.messages if group.messages is not None else group.prompt
    return 0 if prompt is None else _prompt_tokens(served, job, prompt, group.tools)


def _prompt_tokens(served: ServedModel, job: JobBase, prompt: str | Sequence[Message], tools: Any = None) -> int:
    if isinstance(prompt, str) and job.prompt_format == "raw":
        return len(served.codec.encode(prompt))
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _turns(prompt)
    return len(served.codec.encode_chat(turns, tools=tools, **job.chat_template_kwargs))


def _example_tokens(served: ServedModel, job: SftJob, example: SftExample) -> int:
    if example.messages is not None:
        options = job.chat_template_kwargs
        turns = _turns(example.messages)
        # Up to two tokens behind the last turn are the template's (its end and a newline), not the example's.
        tokens = served.codec.encode_chat(turns, tools=example.tools, add_generation_prompt=False, **options)
        return max(1, len(tokens) - 2)
    prompt = _prompt_tokens(served, job, example.prompt or "", example.tools)
    return prompt + len(served.codec.encode_completion(example.completion or ""))


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in messages]
