"""The engine's own log-probabilities of given rollouts, and a forward that has these values (exact_forward).

A trainer that computes a policy in another way than the sampler learns from a ratio that is not quite that of the two
policies (Yao et al. 2025; services.trainer.losses.logprob_gap measures by how much). Here the values are the sampler's,
by its own kernels, and the gradients those of the trainer's forward, which computes the same function to within
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.engine.models.lora.trainable import LoraParams
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import ScoreRequest
from services.trainer.sampling.scored_rollouts import Rollout


def replay(
    host: PolicyHost, rollouts: Sequence[Rollout], lora: LoraParams | None, interrupt: Callable[[], None]
) -> dict[int, Tensor]:
    """Log-probabilities of rollouts as the engine computes them under an adapter as it is now, or (None) without one.

    Not inside the compute gate. It blocks, is interrupted and raises as RolloutSource.generate.

    Returns:
        By ``document.source``: [trained tokens] float32 on the CPU, at the temperature of the rollout.
    """
    if not rollouts:
        return {}
    requests = [request for rollout in rollouts for request in _requests(rollout)]
    if lora is None:
        found = host.rollouts.score(requests, None, interrupt=interrupt)
    else:
        with host.rollouts.policy(lora, interrupt) as policy:
            found = host.rollouts.score(requests, policy, interrupt=interrupt)
    values = iter(found)
    return {
        rollout.document.source: torch.tensor(
            [value for _ in rollout.turns for value in next(values)], dtype=torch.float32
        )
        for rollout in rollouts
    }


def with_values(logprobs: Tensor, values: Tensor) -> Tensor:
    """``values`` to the bit, with the gradient of ``logprobs``: both [N] float32.

    Not ``logprobs + (values - logprobs).detach()``, which rounds: a ratio to the same values would not be exactly 1.
    """
    return values + (logprobs - logprobs.detach())


def _requests(rollout: Rollout) -> list[ScoreRequest]:
    """A request a turn: what comes before it is its prompt, as when it was sampled."""
    tokens = tuple(rollout.document.token_ids)
    return [
        ScoreRequest(tokens[: turn.begin], tokens[turn.begin : turn.begin + turn.tokens], turn.temperature)
        for turn in rollout.turns
    ]
