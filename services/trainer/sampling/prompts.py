"""Prompts that a job samples from: as tokens, in an order, with seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from services.common.errors import InvalidRequest
from services.common.jobs import JobBase, SampledPrompt
from services.common.jobs.documents import placed, prompt_tokens
from services.trainer.host.policy_host import PolicyHost


def sampled_prompts(
    host: PolicyHost, spec: JobBase, given: Sequence[SampledPrompt], *, max_tokens: int, field: str
) -> list[tuple[int, ...]]:
    """The tokens of each prompt.

    Args:
        max_tokens: of the completion that is to fit behind it.
        field: of the job, for messages.

    Raises:
        InvalidRequest: the template refuses one, it has an id outside the vocabulary, or its completion would not fit
            the engine or the limit for training; the prompt is named.
    """
    limit, vocab = host.max_train_tokens, host.model.config.vocab_size
    prompts = []
    for index, asked in enumerate(given):
        with placed(f"{field}[{index}]"):
            tokens = asked.prompt_token_ids
            if tokens is None:
                text = asked.messages if asked.prompt is None else asked.prompt
                tokens = prompt_tokens(host.codec, spec, text or "", asked.tools)
            if max(tokens) >= vocab:
                raise InvalidRequest(f"a token id is over the model's vocabulary of {vocab}")
            if len(tokens) + max_tokens > limit:
                raise InvalidRequest(
                    f"its {len(tokens)} tokens and max_tokens {max_tokens} are over this engine's limit of "
                    f"{limit} for training (max_train_tokens): shorten it, or lower max_tokens"
                )
            host.rollouts.check(len(tokens), max_tokens)
        prompts.append(tuple(tokens))
    return prompts


def check_stop_tokens(host: PolicyHost, token_ids: Sequence[int], field: str) -> None:
    """Raises InvalidRequest if one is outside the vocabulary."""
    vocab = host.model.config.vocab_size
    if wrong := [token for token in token_ids if token >= vocab]:
        raise InvalidRequest(f"{field}: {wrong[0]} is over the model's vocabulary of {vocab}", param=field)


def sample_seed(*parts: int | str) -> int:
    """63 bits, a function of the parts: the job's seed, the round, and what is drawn in it."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
