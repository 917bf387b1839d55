"""Scored rollouts become documents with advantages.

A group whose rewards are all equal has no advantage and is skipped. If that is true of every group, the job fails: a
version that is identical to its parent would look like progress.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoCompletion, GrpoGroup, GrpoJob, check_spread
from services.common.jobs.documents import Document, completion_document, placed, prompt_tokens
from services.common.jobs.kinds.rollouts import check_unmasked, rollout_tokens
from services.common.jobs.trajectories.credit import Credit
from services.common.jobs.trajectories.documents import trajectory_documents
from services.common.jobs.trajectories.segments import Trajectory
from services.trainer.host.policy_host import PolicyHost
from services.trainer.losses import turn_advantages
from services.trainer.packing import overlong


@dataclass(frozen=True, slots=True)
class RolloutTurn:
    """Consecutive tokens of a rollout that were sampled at once."""

    begin: int
    """Place of the first one in the document."""
    tokens: int
    advantage: float
    temperature: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of a group that has spread, or a sequence of a trajectory. ``document.source`` is its index among
    the run's rollouts."""

    document: Document
    turns: Sequence[RolloutTurn]
    """In order; their tokens are exactly the trained ones."""
    behaviour: Tensor | None
    """[trained tokens] float32 on the CPU, None where the sampler said nothing."""
    truncated: bool
    masked: bool
    """Counts in its group's baseline only; nothing is learnt from its tokens."""
    member: int = 0
    """Number of its trajectory in the group: those of several sequences have several rollouts."""

    def __post_init__(self) -> None:
        if sum(turn.tokens for turn in self.turns) != self.document.num_trained:
            raise ValueError("the turns of a rollout are not its trained tokens")

    @property
    def advantages(self) -> list[float]:
        """Advantage of each trained token."""
        return [turn.advantage for turn in self.turns for _ in range(turn.tokens)]

    @property
    def temperatures(self) -> list[float]:
        """Temperature of each trained token."""
        return [turn.temperature for turn in self.turns for _ in range(turn.tokens)]


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Reward statistics of all rollouts of the job, those in skipped groups included: how good the policy that sampled
    them is."""

    mean: float
    std: float
    """Unbiased; 0 for a single rollout."""
    groups: int
    groups_skipped: int
    """Groups whose rewards are all equal."""

    @classmethod
    def of(cls, groups: Sequence[GrpoGroup], credit: Credit) -> RewardStats:
        rewards = [reward for group in groups for reward in group.rewards]
        mean = math.fsum(rewards) / len(rewards)
        variance = math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
        skipped = sum(not credit.spread(group.turn_rewards) for group in groups)
        return cls(mean, math.sqrt(variance), len(groups), skipped)


@dataclass(frozen=True, slots=True)
class ScoredRollouts:
    """Rollouts that a GRPO job learns from, with their groups and rewards."""

    rollouts: Sequence[Rollout]
    groups: Sequence[Sequence[int]]
    """Indices into ``rollouts``; each group has a member that is not masked."""
    rewards: RewardStats
    notes: Sequence[str]

    @property
    def longest(self) -> int:
        """Tokens of the longest completion, masked ones included."""
        found: dict[tuple[int, int], int] = {}
        for place, group in enumerate(self.groups):
            for at in group:
                member = place, self.rollouts[at].member
                found[member] = found.get(member, 0) + self.rollouts[at].document.num_trained
        return max(found.values())


def scored_rollouts(host: PolicyHost, spec: GrpoJob) -> ScoredRollouts:
    """Tokenizes and computes advantages.

    Raises:
        InvalidRequest: a rollout cannot be trained on (it is named), there are completion ids left, which only the
            gateway can resolve, or there is nothing to learn.
    """
    if spec.completion_ids or spec.stored:
        raise InvalidRequest(
            "completion_id rollouts must be submitted through the gateway, which fetches their tokens from the engine",
            param="rollouts" if spec.rollouts is not None else "groups",
        )
    given = spec.scored_groups
    check_spread(given, spec.credit)
    check_unmasked(given, spec.credit, mask_truncated=spec.mask_truncated)
    found = gather(host, spec, given)
    if spec.max_completion_length is not None and found.longest > spec.max_completion_length:
        raise InvalidRequest(
            f"max_completion_length is {spec.max_completion_length}, and a completion has {found.longest} tokens with "
            "the one that ends it: give the max_tokens that the rollouts were sampled with",
            param="max_completion_length",
        )
    return found


def gather(host: PolicyHost, spec: GrpoJob, given: Sequence[GrpoGroup]) -> ScoredRollouts:
    """The same of any groups, also if there is nothing to learn from them.

    Raises:
        InvalidRequest: a rollout cannot be trained on; it is named.
    """
    rewards = RewardStats.of(given, spec.credit)
    groups: list[list[int]] = []
    rollouts: list[Rollout] = []
    silent = 0
    for number, group in enumerate(given):
        members = _rollouts(host, spec, f"groups[{number}]", group, len(rollouts), rewards)
        if all(rollout.masked for rollout in members):
            silent += bool(members)
            continue
        groups.append(list(range(len(rollouts), len(rollouts) + len(members))))
        rollouts.extend(members)
    open_ended = sum(bool(one.text) and one.truncated is None for group in given for one in group.completions)
    return ScoredRollouts(rollouts, groups, rewards, _notes(rollouts, rewards, silent, open_ended))


def _notes(rollouts: Sequence[Rollout], rewards: RewardStats, silent: int, open_ended: int) -> list[str]:
    notes = []
    if open_ended:
        notes.append(
            f"{open_ended} completions are texts that do not say whether they ended: the token that ends one is not "
            "learnt; give `truncated` (true where finish_reason is length), or their completion ids"
        )
    if rewards.groups_skipped:
        notes.append(f"{rewards.groups_skipped} of {rewards.groups} groups skipped: all rewards in them are equal")
    if silent:
        notes.append(f"{silent} of {rewards.groups} groups skipped: every completion in them is truncated")
    masked = sum(rollout.masked for rollout in rollouts)
    if masked:
        notes.append(f"{masked} of {len(rollouts)} rollouts are truncated: they count in their group's baseline only")
    recomputed = sum(rollout.behaviour is None and not rollout.masked for rollout in rollouts)
    if recomputed:
        notes.append(
            f"behaviour=recomputed for {recomputed} of {len(rollouts)} rollouts: they came without the "
            "log-probabilities of the policy that sampled them"
        )
    return notes


def _rollouts(
    host: PolicyHost, spec: GrpoJob, where: str, group: GrpoGroup, first: int, rewards: RewardStats
) -> list[Rollout]:
    """The group's rollouts, numbered from ``first``; none if it has no spread."""
    advantages = turn_advantages(
        spec.credit,
        group.turn_rewards,
        scale=spec.scale_rewards != "none",
        std=rewards.std if spec.scale_rewards == "batch" else None,
    )
    if advantages is None:
        return []
    prompt = _prompt(host, spec, where, group) if group.has_prompt else []
    found: list[Rollout] = []
    for number, completion in enumerate(group.completions):
        at = f"{where}.completions[{number}]"
        found.append(_rollout(host, spec, at, prompt, completion, advantages[number][0], first, number))
        first += 1
    for number, trajectory in enumerate(group.played):
        at = f"{where}.trajectories[{number}]"
        sequences = _sequences(host, spec, at, prompt, trajectory, advantages[number], first, number)
        found += sequences
        first += len(sequences)
    return found


def _prompt(host: PolicyHost, spec: GrpoJob, where: str, group: GrpoGroup) -> list[int]:
    prompt = group.prompt_token_ids
    if prompt is None:
        asked = group.messages if group.prompt is None else group.prompt
        with placed(where):
            prompt = prompt_tokens(host.codec, spec, asked or "", group.tools)
    if not prompt:
        raise InvalidRequest(f"{where}: the prompt has no tokens", param=where)
    return prompt


def _rollout(
    host: PolicyHost,
    spec: GrpoJob,
    at: str,
    prompt: Sequence[int],
    completion: GrpoCompletion,
    advantage: float,
    source: int,
    member: int,
) -> Rollout:
    with placed(at):
        tokens = rollout_tokens(host.codec, spec, prompt, completion)
    truncated = bool(completion.truncated)
    rollout = Rollout(
        document=completion_document(prompt, tokens, source),
        turns=[RolloutTurn(len(prompt), len(tokens), advantage, _sampled_at(completion.temperature))],
        behaviour=None if completion.logprobs is None else torch.tensor(completion.logprobs),
        truncated=truncated,
        masked=spec.mask_truncated and truncated,
        member=member,
    )
    return _within_limits(host, spec, at, rollout)


def _sequences(
    host: PolicyHost,
    spec: GrpoJob,
    at: str,
    prompt: Sequence[int],
    trajectory: Trajectory,
    advantages: Sequence[float],
    first: int,
    member: int,
) -> list[Rollout]:
    """Rollouts of the sequences of a trajectory, numbered from ``first``."""
    with placed(at):
        parts = trajectory_documents(host.codec, trajectory, first, prompt=prompt, options=spec.chat_template_kwargs)
    found = []
    for number, part in enumerate(parts):
        said = [value for turn in part.turns for value in turn.action.logprobs or ()]
        rollout = Rollout(
            document=replace(part.document, source=first + number),
            turns=[
                RolloutTurn(
                    turn.begin,
                    len(turn.action.token_ids),
                    advantages[turn.number],
                    _sampled_at(turn.action.temperature),
                )
                for turn in part.turns
            ],
            behaviour=torch.tensor(said) if said else None,
            truncated=trajectory.truncated,
            masked=spec.mask_truncated and trajectory.truncated,
            member=member,
        )
        found.append(_within_limits(host, spec, at, rollout))
    return found


def _sampled_at(temperature: float) -> float:
    """A greedy rollout's log-probabilities are of the plain distribution."""
    return temperature or 1.0


def _within_limits(host: PolicyHost, spec: GrpoJob, at: str, rollout: Rollout) -> Rollout:
    document = rollout.document
    if max(document.token_ids) >= (vocab := host.model.config.vocab_size):
        raise InvalidRequest(f"{at}: a token id is over the model's vocabulary of {vocab}", param=at)
    if document.length > host.max_train_tokens:
        raise overlong(at, document.length, host.max_train_tokens, "leave it out", counted="tokens with its prompt")
    if spec.exact_forward:
        for turn in rollout.turns:
            with placed(at):
                host.rollouts.check(turn.begin, turn.tokens)
    return rollout
