"""A sampled round with what its sampling took, and rounds ahead as parts of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from services.engine.models.lora.trainable import LoraParams
from services.trainer.host.rollouts import sampling_rate
from services.trainer.sampling.environments.rounds import EpisodeRound
from services.trainer.sampling.rounds.ahead import PlannedRound
from services.trainer.sampling.rounds.round import Round
from services.trainer.timers import StepTimer


@dataclass(frozen=True, slots=True)
class Sampled:
    """A round, and what its sampling took."""

    round: Round | EpisodeRound
    said: Mapping[str, float]
    """Metrics of the sampling."""
    seconds: float = 0.0
    """With the policy's way into its slot and the rewards. 0: an earlier attempt of the job sampled it."""

    @classmethod
    def of(
        cls,
        found: Round | EpisodeRound,
        tokens: int,
        watch: StepTimer,
        said: Mapping[str, float],
    ) -> Sampled:
        """A round of which so many tokens were sampled while this timer ran; ``said`` are further metrics of it."""
        said = {**said, **sampling_rate(tokens, watch), "reward_seconds": watch.waited("score")}
        return cls(found, said, watch.waited("swap") + watch.waited("rollout") + watch.waited("score"))


def planned_state(planned: PlannedRound[Sampled]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON of a checkpoint: what was sampled of a round, or else the policy that samples it."""
    found = planned.found
    tensors, said = (planned.policy.state(), None) if found is None else found.round.state()
    named = {f"ahead.{planned.number}.{name}": value for name, value in tensors.items()}
    told = {} if found is None else dict(found.said)
    return named, {"number": planned.number, "version": planned.version, "round": said, "said": told}


def planned_of(
    tensors: Mapping[str, Tensor],
    data: Mapping[str, Any],
    policy: LoraParams,
    restored: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Round | EpisodeRound],
) -> PlannedRound[Sampled]:
    """A round from its planned_state().

    Args:
        policy: takes the weights of the policy, if it has not sampled yet.
        restored: makes a round of its tensors and data.
    """
    number = int(data["number"])
    prefix = f"ahead.{number}."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    found = None
    if data["round"] is None:
        policy.load_state(own)
    else:
        found = Sampled(restored(own, data["round"]), data["said"])
    return PlannedRound(number, int(data["version"]), policy, found)
