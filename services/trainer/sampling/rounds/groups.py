"""Groups of a round: prompts with their rollouts, of which some may have been cut before their end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from services.common.jobs.fields.cut import ROLLOUTS_DROPPED, ROLLOUTS_REQUEUED
from services.common.jobs.kinds.generate import RolloutPrompt
from services.trainer.host.rollouts import Completion, RolloutRequest
from services.trainer.sampling.prompts import sample_seed

M = TypeVar("M")

NOT_BEGUN = Completion((), array("f"), truncated=False, cut=True)
"""A completion without a token yet."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt as tokens, and what it was asked with."""

    token_ids: tuple[int, ...]
    asked: RolloutPrompt


@dataclass(frozen=True, slots=True)
class Group(Generic[M]):
    """Rollouts of one prompt, which are compared with each other."""

    number: int
    """Round that its prompt was drawn for."""
    place: int
    """Place of the prompt in that round."""
    prompt: ScoredPrompt
    members: Sequence[M]
    requeued: int = 0
    """Rounds that it has waited."""


@dataclass(frozen=True, slots=True)
class Parted(Generic[M]):
    """Groups of a round after it was sampled."""

    whole: list[Group[M]]
    """Those that are learnt from. What was dropped is not in them any more; each has a member."""
    waiting: list[Group[M]]
    """Those that the next round goes on with."""
    requeued: int
    dropped: int

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that begins the round."""
        return {
            ROLLOUTS_REQUEUED: float(self.requeued),
            ROLLOUTS_DROPPED: float(self.dropped),
            "groups_waiting": float(len(self.waiting)),
        }


def parted(groups: Sequence[Group[M]], unfinished: Callable[[M], bool], requeues: int) -> Parted[M]:
    """Parts the groups of a round.

    A group waits as a whole, so that a group's advantages are of all of its members under the same rewards; one whose
    members were dropped is compared without them.

    Args:
        requeues: rounds that a group may wait.
    """
    whole, waiting, requeued, dropped = [], [], 0, 0
    for group in groups:
        ended = [one for one in group.members if not unfinished(one)]
        missing = len(group.members) - len(ended)
        if missing and group.requeued < requeues:
            waiting.append(replace(group, requeued=group.requeued + 1))
            requeued += missing
            continue
        dropped += missing
        if ended:
            whole.append(replace(group, members=ended))
    return Parted(whole, waiting, requeued, dropped)


def going_on(request: RolloutRequest, found: Completion) -> RolloutRequest:
    """Request of the rest of a completion that was cut. The seed is another one: it begins with the tokens to come."""
    if not found.token_ids:
        return request
    return replace(request, seed=sample_seed(request.seed, len(found.token_ids)), begun=found)


def staleness(number: int, version: float, completions: Sequence[Completion]) -> dict[str, float]:
    """Rounds of updates between the policies that sampled a round's tokens and the one that begins to learn from them,
    as metrics.

    Args:
        version: of completions that do not say by which policies they are.
    """
    spans = [span for one in completions for span in one.versions or ((version, len(one.token_ids)),)]
    tokens = sum(count for _, count in spans)
    if not tokens:
        return {"staleness_mean": float(number - version), "staleness_max": float(number - version)}
    return {
        "staleness_mean": sum((number - by) * count for by, count in spans) / tokens,
        "staleness_max": float(max(number - by for by, _ in spans)),
    }
