"""Completions of a session's weights, sampled by the engine beside the trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from services.common.errors import InvalidRequest
from services.common.jobs.training_sessions.calls import Sample
from services.engine.models.lora.trainable import LoraParams
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import RolloutRequest, RolloutSampling


def sample(host: PolicyHost, lora: LoraParams, call: Sample, interrupt: Callable[[], None]) -> dict[str, Any]:
    """Puts the weights into an adapter slot that no client can name and generates. Blocks, not on the trainer thread:
    the trainer goes on meanwhile.

    Args:
        lora: must not change before this returns.
        interrupt: called several times a second; may raise.

    Returns:
        ``prompt_token_ids``, and ``sequences`` in the order of the prompts, ``n`` each.

    Raises:
        InvalidRequest: a prompt has no tokens, or does not fit the engine's context together with max_tokens.
        Overloaded: no adapter slot became free.
        DeadlineExceeded: users' requests left no time.
    """
    prompts = checked_prompts(host, call)
    requests = [
        RolloutRequest(prompt, _seed(call.seed, place, member))
        for place, prompt in enumerate(prompts)
        for member in range(call.n)
    ]
    sampling = RolloutSampling(call.temperature, call.max_tokens, frozenset(call.stop_token_ids))
    with host.rollouts.policy(lora, interrupt) as policy:
        found = host.rollouts.generate(requests, sampling, policy, interrupt=interrupt)
    sequences = [
        {
            "prompt": number // call.n,
            "token_ids": list(one.token_ids),
            "logprobs": one.logprobs.tolist(),
            "text": host.codec.decode(one.token_ids),
            "truncated": one.truncated,
        }
        for number, one in enumerate(found)
    ]
    return {"prompt_token_ids": [list(prompt) for prompt in prompts], "sequences": sequences}


def checked_prompts(host: PolicyHost, call: Sample) -> list[tuple[int, ...]]:
    """The prompts as tokens.

    Raises:
        InvalidRequest: one has no tokens, or does not fit the engine's context together with max_tokens.
    """
    prompts = []
    for index in range(len(call.prompts)):
        prompt = _tokens(host, call, index)
        try:
            host.rollouts.check(len(prompt), call.max_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(f"prompts[{index}]: {error.message}", param=f"prompts[{index}]") from error
        prompts.append(prompt)
    return prompts


def _tokens(host: PolicyHost, call: Sample, index: int) -> tuple[int, ...]:
    prompt = call.prompts[index]
    if not isinstance(prompt, str):
        return tuple(prompt)
    if call.prompt_format == "chat":
        tokens = host.codec.encode_chat([{"role": "user", "content": prompt}])
    else:
        tokens = host.codec.encode(prompt)
    if not tokens:
        raise InvalidRequest(f"prompts[{index}] has no tokens", param=f"prompts[{index}]")
    return tuple(tokens)


def _seed(seed: int, place: int, member: int) -> int:
    """Seed of one completion: another for each, and a function of the call alone."""
    digest = hashlib.sha256(f"{seed}:{place}:{member}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
