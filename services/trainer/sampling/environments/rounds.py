"""Rounds of episodes: groups of trajectories with their rewards, what the round's metrics say of them, and both as data
of a checkpoint."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.common.errors import Unavailable
from services.common.jobs import GrpoGroup
from services.common.jobs.kinds.environment import DROPPED, FAILURES, EnvironmentReward, FailureKind
from services.common.jobs.trajectories.segments import Action, Observation, Trajectory
from services.trainer.sampling.environments.episodes import Dropped, Episode
from services.trainer.sampling.rounds.groups import Group, staleness


def trajectory_of(episode: Episode, weight: float, temperature: float, *, own_prompt: bool) -> Trajectory:
    """An episode as it is learnt from.

    Args:
        weight: of the environment's rewards.
        own_prompt: the prompt is its first segment; otherwise it is given beside it.
    """
    segments: list[Action | Observation] = (
        [Observation(type="observation", token_ids=list(episode.prompt))] if own_prompt else []
    )
    for place, (action, reward) in enumerate(zip(episode.actions, episode.rewards, strict=True)):
        segments.append(
            Action(
                type="action",
                token_ids=list(action.token_ids),
                logprobs=action.logprobs.tolist(),
                temperature=temperature,
                reward=weight * reward,
            )
        )
        if place < len(episode.observations):
            segments.append(Observation(type="observation", token_ids=list(episode.observations[place])))
    return Trajectory(segments=segments, reward=episode.others, truncated=episode.truncated)


@dataclass(frozen=True, slots=True)
class EpisodeRound:
    """A round: the groups that are left of it, and its metrics."""

    number: int
    given: Sequence[GrpoGroup]
    said: Mapping[str, float]
    earned: Sequence[tuple[int, int, Sequence[float]]]
    """Rewards of the episodes of each prompt, without those that were dropped, by its round and its place there."""

    def groups(self) -> list[GrpoGroup]:
        """Groups as a client would have posted them."""
        return list(self.given)

    def metrics(self) -> dict[str, float]:
        """Metrics of the round, however it is trained on."""
        return dict(self.said)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON of a checkpoint."""
        actions = [one for group in self.given for member in group.played for one in member.actions]
        logprobs = array("f", [value for one in actions for value in one.logprobs or ()])
        groups = [group.model_dump(mode="json", exclude_none=True) for group in self.given]
        for member in (member for group in groups for member in group["trajectories"]):
            for segment in member["segments"]:
                segment.pop("logprobs", None)
        tensors = {"round.logprobs": torch.tensor(logprobs, dtype=torch.float32)}
        return tensors, {
            "number": self.number,
            "groups": groups,
            "metrics": dict(self.said),
            "rewards": list(self.earned),
        }

    @classmethod
    def of_state(cls, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> EpisodeRound:
        """Round from its state()."""
        left = iter(tensors["round.logprobs"].tolist())
        groups = []
        for given in data["groups"]:
            for member in given["trajectories"]:
                for segment in member["segments"]:
                    if segment["type"] == "action":
                        segment["logprobs"] = [next(left) for _ in segment["token_ids"]]
            groups.append(GrpoGroup.model_validate(given))
        # Earlier releases sampled by the policy as it was.
        said = {"staleness_mean": 0.0, "staleness_max": 0.0}
        said |= {name: float(value) for name, value in data["metrics"].items()}
        number = int(data["number"])
        earned = data.get("rewards")
        if earned is None:  # earlier releases cut nothing: its own prompts in their order
            earned = [(number, place, rewards) for place, rewards in enumerate(data.get("earned", ()))]
        return cls(number, groups, said, [(of, place, rewards) for of, place, rewards in earned])


def ended(found: Sequence[Episode | Dropped], environment: EnvironmentReward) -> list[Episode]:
    """The episodes that came to their ends.

    Raises:
        Unavailable: too many were dropped; the reason of the last is in the message.
    """
    dropped = [one for one in found if isinstance(one, Dropped)]
    if len(dropped) > environment.max_dropped * len(found):
        kinds = Counter(kind.value for one in dropped for kind in one.failures)
        raise Unavailable(
            f"the environment failed {len(dropped)} of {len(found)} episodes, and max_dropped is "
            f"{environment.max_dropped:g} ({', '.join(f'{kind}: {count}' for kind, count in kinds.most_common())}); "
            f"the last time because {dropped[-1].reason}"
        )
    return [one for one in found if isinstance(one, Episode)]


def made_round(
    number: int,
    version: float,
    temperature: float,
    environment: EnvironmentReward,
    played: Sequence[Group[Episode | Dropped | None]],
) -> EpisodeRound:
    """A round of the episodes of each group, begun by a policy that had been trained on ``version`` rounds."""
    groups, unequal = [], 0
    earned: list[tuple[int, int, Sequence[float]]] = []
    for group in played:
        left = [one for one in group.members if isinstance(one, Episode)]
        prompts = {one.prompt for one in left}
        unequal += len(prompts) > 1 or len({one.state for one in left if one.state}) > 1
        trajectories = [
            trajectory_of(one, environment.weight, temperature, own_prompt=len(prompts) > 1) for one in left
        ]
        earned.append((group.number, group.place, [environment.weight * one.gained + one.others for one in left]))
        if left:
            prompt = list(left[0].prompt) if len(prompts) == 1 else None
            groups.append(GrpoGroup(prompt_token_ids=prompt, trajectories=[*trajectories]))
    ended = [one for group in played for one in group.members if isinstance(one, Episode)]
    metrics = staleness(number, version, [action for one in ended for action in one.actions])
    metrics["environment_unequal_starts"] = float(unequal)
    if groups:
        metrics |= episode_metrics(ended, environment)
        metrics["frac_reward_zero_std"] = sum(max(one.rewards) == min(one.rewards) for one in groups) / len(groups)
    return EpisodeRound(number, groups, metrics, earned)


def episode_metrics(found: Sequence[Episode | Dropped], environment: EnvironmentReward) -> dict[str, float]:
    """Metrics of episodes; some came to their ends."""
    left = [one for one in found if isinstance(one, Episode)]
    count = len(left)
    return {
        "environment_reward": math.fsum(one.gained for one in left) / count,
        "environment_success": sum(one.gained >= environment.success_at for one in left) / count,
        "environment_turns": sum(len(one.actions) for one in left) / count,
        "completion_length_mean": sum(len(action.token_ids) for one in left for action in one.actions) / count,
        "truncated_fraction": sum(one.truncated for one in left) / count,
    }


def failure_metrics(found: Sequence[Episode | Dropped]) -> dict[str, float]:
    """Counts of what failed while these episodes were played. They belong to the step that played them, so that the
    sum over steps is the job's."""
    failures = Counter(kind for one in found for kind in one.failures)
    return {
        DROPPED: float(sum(isinstance(one, Dropped) for one in found)),
        "environment_retried": float(sum(isinstance(one, Episode) and bool(one.failures) for one in found)),
        **{FAILURES[kind]: float(failures[kind]) for kind in FailureKind},
    }
