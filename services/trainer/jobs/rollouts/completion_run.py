"""GRPO that samples its own rollouts: generate → score → train, for some rounds, with the engine that serves.

The first step of a round samples and scores (services/trainer/jobs/rollouts/rounds.py). Groups without spread are left
out. A round may have none with spread: its steps change nothing, and the job goes on.

With `staleness` rounds are sampled ahead (services/trainer/sampling/rounds/ahead.py). Which policy samples a round
follows from its number alone, so a resumed job goes on with the same rounds; unless `in_flight` has rollouts change to
the newest one wherever they are. With `cut` a round may leave groups to the next one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoGroup, GrpoJob
from services.common.jobs.fields.cut import ROLLOUTS_CHANGED, ROLLOUTS_DROPPED, ROLLOUTS_REQUEUED
from services.common.jobs.fields.messages import as_turns
from services.common.jobs.kinds.generate import GenerateSettings, RolloutPrompt
from services.common.jobs.scorers.registry import Rewards
from services.common.jobs.scorers.sample import Sample, without_thinking
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import Completion, RolloutRequest
from services.trainer.jobs.base import RunState
from services.trainer.jobs.grpo_run import GrpoRun
from services.trainer.jobs.rollouts.rounds import RoundRun, Rounds
from services.trainer.sampling.curriculum import CurriculumSampler
from services.trainer.sampling.environments.rounds import EpisodeRound
from services.trainer.sampling.prompts import check_stop_tokens, sample_seed, sampled_prompts
from services.trainer.sampling.reward_signs import RewardSigns, drift
from services.trainer.sampling.rounds.ahead import PlannedRound, SamplingAhead
from services.trainer.sampling.rounds.groups import (
    NOT_BEGUN,
    Group,
    Parted,
    ScoredPrompt,
    going_on,
    parted,
)
from services.trainer.sampling.rounds.newest import NewestPolicy, PolicyAt
from services.trainer.sampling.rounds.round import Round, groups_of, groups_state
from services.trainer.sampling.rounds.round_sampler import RoundSampler
from services.trainer.sampling.sampled import Sampled, planned_of, planned_state
from services.trainer.sampling.scored_rollouts import RewardStats, ScoredRollouts, gather
from services.trainer.timers import StepTimer

_COUNTED = (ROLLOUTS_REQUEUED, ROLLOUTS_DROPPED, ROLLOUTS_CHANGED)
_NOTHING = ScoredRollouts((), (), RewardStats(0.0, 0.0, 0, 0), ())


class RolloutRun(RoundRun[ScoredPrompt], GrpoRun):
    """A prepared GRPO job with `generate`; see `prepare`."""

    measure = "eval_reward"

    def __init__(
        self,
        spec: GrpoJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        settings: GenerateSettings,
        prompts: Sequence[ScoredPrompt],
        held_out: Sequence[ScoredPrompt],
        rewards: Rewards,
    ) -> None:
        self._generate = settings
        self._reward = rewards
        self._scoring = threading.Lock()
        self._ahead: SamplingAhead[Sampled] = SamplingAhead(self._sampled_ahead)
        self._newest = NewestPolicy() if settings.in_flight == "change" else None
        self._round: Round | EpisodeRound | None = None
        self._left: dict[int, Sequence[Group[Any]]] = {}
        """Groups that wait for a round, by its number; of one that waits for its rewards, all. Written by whoever
        samples, before its round is said to be sampled; the trainer's thread removes what is behind it."""
        self._counts: Counter[str] = Counter()
        """Rollouts of the job so far that were cut or changed their policy."""
        self._signs = RewardSigns()
        self._drift: dict[str, float] = {}
        per_step = min(spec.groups_per_step or settings.round_prompts, settings.round_prompts)
        per_epoch = -(-settings.round_prompts // per_step)
        kind = RoundSampler if settings.curriculum is None else partial(CurriculumSampler, settings.curriculum)
        sampler: RoundSampler[ScoredPrompt] = kind(
            source=host.rollouts,
            prompts=prompts,
            size=settings.round_prompts,
            seed=spec.seed,
            max_tokens=settings.max_tokens,
            stop_token_ids=settings.stop_token_ids,
        )
        rounds = Rounds(settings.rounds, spec.epochs, per_epoch, settings.eval_every)
        self._plan_rounds(rounds, sampler, settings.temperature, held_out)
        longest = sorted(map(self._most_tokens, prompts), reverse=True)
        lengths = [length for length in longest[: settings.round_prompts] for _ in range(settings.completions)]
        super().__init__(
            spec,
            host,
            parent,
            _NOTHING,
            total_steps=self._rounds.total_steps,
            longest=lengths,
        )

    @classmethod
    def prepare(cls, spec: GrpoJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> RolloutRun:
        """Tokenizes the prompts, compiles the rewards and sizes the job for the longest completions it may sample.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
        """
        settings = spec.generate
        if settings is None:
            raise InvalidRequest("the job has no generate", param="generate")
        check_stop_tokens(host, settings.stop_token_ids, "generate.stop_token_ids")
        return cls(
            spec,
            host,
            parent,
            settings=settings,
            prompts=_tokenized(host, spec, settings, settings.prompts, "prompts"),
            held_out=_tokenized(host, spec, settings, settings.eval_prompts, "eval_prompts"),
            rewards=Rewards(settings.scored, host.grants),
        )

    def _most_tokens(self, prompt: ScoredPrompt) -> int:
        """Tokens of the longest document of a prompt."""
        return len(prompt.token_ids) + self._generate.max_tokens

    # -- steps

    def _members(self, index: int) -> Sequence[Sequence[int]]:
        """An even part of the groups of the round that is under way: how many have spread is not known before."""
        return self._rounds.part(self._scored.groups, index)

    @property
    def _steps_on_these(self) -> int:
        return self._rounds.steps

    def _known_values(self, index: int) -> dict[int, Tensor]:
        """Log-probabilities of the rollouts as they were sampled: before the round's first step the policy is still the
        one that sampled, unless the round was sampled ahead."""
        if not self._is_samplers(index):
            return {}
        return {at: one.behaviour for at, one in enumerate(self._rollouts) if one.behaviour is not None}

    def _is_samplers(self, index: int) -> bool:
        """See GrpoRun: not of a round that was sampled ahead."""
        return super()._is_samplers(index) and self._round is not None and not self._round.metrics()["staleness_max"]

    @property
    def _longest(self) -> int:
        return self._job.max_completion_length or self._generate.max_tokens

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        if self._round is None:
            raise ValueError(f"step {index} has no rollouts")
        if self.batch(index):
            metrics, inputs = super()._accumulate(index, interrupt)
        else:
            metrics, inputs = self._reward_metrics(), 0
        metrics = self._drift | metrics | self._round.metrics()
        if isinstance(self._sampler, CurriculumSampler):
            metrics |= self._sampler.metrics()
        return metrics | self._signs.of(metrics), inputs

    def _reward_metrics(self) -> dict[str, float]:
        if not self._scored.rewards.groups:
            return {}
        return {
            "reward_mean": self._scored.rewards.mean,
            "reward_std": self._scored.rewards.std,
            "groups_skipped": float(self._scored.rewards.groups_skipped),
        }

    def _groups(self) -> Sequence[GrpoGroup]:
        return () if self._round is None else self._round.groups()

    # -- rounds

    @property
    def round(self) -> Round | EpisodeRound | None:
        """The round that is under way; None: there was none yet."""
        return self._round

    def step(self, index: int, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.step. What is sampled ahead goes on beside it, and ends with a step that does."""
        try:
            metrics = super().step(index, interrupt)
        except BaseException:
            self.close()
            raise
        if self._newest is not None:
            self._newest.offer(PolicyAt((index + 1) / self._rounds.steps, self._lora.copied("cpu")))
        return metrics

    @property
    def outcome(self) -> tuple[str, ...]:
        """See JobRun.outcome."""
        requeued, dropped, changed = (round(self._counts[name]) for name in _COUNTED)
        notes = []
        if requeued or dropped:
            notes.append(
                f"{requeued + dropped} rollouts were cut by generate.cut: {requeued} went on in the next round, and "
                f"{dropped} were dropped"
            )
        if changed:
            notes.append(f"{changed} times a rollout under way went on with a newer policy")
        return tuple(notes)

    def close(self) -> None:
        """See JobRun.close."""
        self._ahead.stop()

    def _before(self, index: int, interrupt: Callable[[], None]) -> None:
        super()._before(index, interrupt)
        self._ahead.go_on()

    def _begin(self, number: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Samples a round, or takes the one that was sampled ahead and plans those that are now."""
        if not self._generate.staleness:
            found = self._sample_round(number, PolicyAt(number, self._lora), self.watch, interrupt)
            waited = found.seconds
        else:
            self._plan(number)
            with self.watch.waiting("rollout"):
                taken = self._ahead.take(interrupt).found
            waited = self.watch.waited("rollout")
            if taken is None or taken.round.number != number:
                raise ValueError(f"round {number} was not the next that is planned")
            found = taken
        self._enter(found.round)
        if isinstance(self._sampler, CurriculumSampler):
            self._sampler.learn(found.round.earned, keep=number - self._requeues)
        for at in list(self._left):
            if at <= number:
                del self._left[at]
        self._counts.update({name: found.said[name] for name in _COUNTED if name in found.said})
        overlap = 1 - waited / found.seconds if found.seconds else 1.0
        return {
            **found.said,
            "sampling_seconds": found.seconds,
            "waiting_seconds": waited,
            "overlap_share": max(0.0, overlap),
        }

    def _plan(self, number: int) -> None:
        """Plans the rounds that may be sampled from round ``number`` on, by the policy as it is before it."""
        planned = [one.number for one in self._ahead.planned]
        first = planned[-1] + 1 if planned else number
        last = min(number + self._generate.staleness, self._rounds.count - 1)
        if first <= last:
            policy = self._lora.copied("cpu")
            for at in range(first, last + 1):
                self._sampler.chosen(at)  # a curriculum draws here, by what the rounds before have shown
                self._ahead.plan(PlannedRound(at, number, policy))

    def _sampled_ahead(self, planned: PlannedRound[Sampled], interrupt: Callable[[], None]) -> Sampled:
        watch = StepTimer(torch.device("cpu"))  # only waits, by the clock of the host
        policy = PolicyAt(planned.version, planned.policy)
        if self._newest is not None:
            policy = self._newest.after(policy.version) or policy
        return self._sample_round(planned.number, policy, watch, interrupt)

    def _sample_round(self, number: int, policy: PolicyAt, watch: StepTimer, interrupt: Callable[[], None]) -> Sampled:
        """A round that this policy begins, and what it leaves to the next one."""
        groups = self._to_sample(number, NOT_BEGUN)
        begun = [one for group in groups for one in group.members if one.cut]
        requests = [
            going_on(RolloutRequest(group.prompt.token_ids, self._seed(group, member)), one)
            for group in groups
            for member, one in enumerate(group.members)
            if one.cut
        ]
        temperature = self._generate.temperature
        some, changed = self._sampler.sample_some(
            policy, requests, temperature, watch, interrupt, enough=self._enough(len(requests)), newest=self._newest
        )
        found = iter(some)
        groups = [
            replace(group, members=[next(found) if one.cut else one for one in group.members]) for group in groups
        ]
        if not changed and not any(one.cut for group in groups for one in group.members):
            self._left[number] = groups  # scoring them may take as long: if that is interrupted, it alone is repeated
        left = parted(groups, lambda one: one.cut, self._requeues_of(number))
        completions = [one for group in left.whole for one in group.members]
        prompts = [group.prompt for group in left.whole for _ in group.members]
        with watch.waiting("score"):
            rewards = iter(self._score(prompts, completions, interrupt) if completions else ())
        scored = [list(islice(rewards, len(group.members))) for group in left.whole]
        tokens = sum(len(one.token_ids) for one in some) - sum(len(one.token_ids) for one in begun)
        made = Round(number, policy.version, temperature, left.whole, scored)
        return self._sampled_of(made, left, tokens, changed, watch)

    def _to_sample(self, number: int, beginning: Any) -> list[Group[Any]]:
        """Groups of a round: those that wait for it, and its own, whose members are all ``beginning``; or all of them
        as they were sampled, if they were."""
        waiting = self._left.get(number, ())
        if any(group.number == number for group in waiting):
            return list(waiting)
        members = [beginning] * self._generate.completions
        own = [Group(number, place, prompt, members) for place, prompt in enumerate(self._sampler.chosen(number))]
        return [*waiting, *own]

    def _seed(self, group: Group[Any], member: int) -> int:
        """Seed of a rollout: the same in whatever round it is sampled."""
        return sample_seed(self._job.seed, group.number, group.place, member)

    def _enough(self, count: int) -> int:
        """How many of so many rollouts are waited for."""
        return count if self._generate.cut is None else self._generate.cut.enough(count)

    @property
    def _requeues(self) -> int:
        return 0 if self._generate.cut is None else self._generate.cut.requeues

    def _requeues_of(self, number: int) -> int:
        """How often a group of a round may have waited, to wait again. Behind the last round there is none."""
        return self._requeues if number + 1 < self._rounds.count else 0

    def _sampled_of(
        self, made: Round | EpisodeRound, left: Parted[Any], tokens: int, changed: int, watch: StepTimer, **said: float
    ) -> Sampled:
        """A round that was sampled. What it leaves to the next one is there before anybody learns of it."""
        self._left[made.number + 1] = left.waiting
        if self._generate.cut is not None:
            said |= left.metrics()
        if self._newest is not None:
            said[ROLLOUTS_CHANGED] = float(changed)
        return Sampled.of(made, tokens, watch, said)

    def _enter(self, found: Round | EpisodeRound) -> None:
        groups = found.groups()
        self._use(gather(self._host, self._job, groups) if groups else _NOTHING)
        self._drift = drift(groups)
        self._round = found

    def _score(
        self, prompts: Sequence[ScoredPrompt], found: Sequence[Completion], interrupt: Callable[[], None]
    ) -> list[float]:
        samples = [self._as_sample(prompt, completion) for prompt, completion in zip(prompts, found, strict=True)]
        with self._scoring:
            return self._reward.score(samples, interrupt)

    def _as_sample(self, prompt: ScoredPrompt, completion: Completion) -> Sample:
        codec = self._host.codec
        return Sample(
            prompt=codec.decode(prompt.token_ids, skip_special=False),
            completion=codec.decode(completion.token_ids),
            tokens=len(completion.token_ids),
            truncated=completion.truncated,
            question=self._question(prompt),
            answer=prompt.asked.answer,
            metadata=prompt.asked.metadata,
            said=without_thinking(codec, prompt.token_ids, completion.token_ids),
        )

    def _question(self, prompt: ScoredPrompt) -> str:
        """Text of the last turn; of token ids their whole text."""
        asked = prompt.asked.prompt if prompt.asked.messages is None else prompt.asked.messages
        return self._host.codec.decode(prompt.token_ids) if asked is None else str(as_turns(asked)[-1]["content"])

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.evaluate: the mean reward of greedy answers to the held-out prompts, as ``eval_reward``."""
        if not self._held_out:
            return {}
        started = time.perf_counter()
        found = self._sample_greedily(self._held_out, interrupt)
        rewards = self._score(self._held_out, found, interrupt)
        return {"eval_reward": math.fsum(rewards) / len(rewards), "eval_seconds": time.perf_counter() - started}

    # -- checkpoints

    def state(self) -> RunState:
        """See JobRun.state: with the rollouts of a round that is under way, and of those ahead what was sampled, or the
        policy that samples."""
        state = super().state()
        ahead = [planned_state(one) for one in self._ahead.planned]
        tensors = {name: value for own, _ in ahead for name, value in own.items()}
        drawn = {"curriculum": self._sampler.state()} if isinstance(self._sampler, CurriculumSampler) else {}
        data = {"signs": dict(self._signs.first), **drawn} | ({"ahead": [said for _, said in ahead]} if ahead else {})
        left, whole = {}, {said["number"] for _, said in ahead if said["round"] is not None}
        # Behind the rounds ahead: what one of those leaves is there before it is sampled.
        for number, groups in list(self._left.items()):
            if number not in whole:
                own, left[str(number)] = self._groups_state(f"left.{number}.", groups)
                tensors |= own
        data |= {"left": left, "counts": dict(self._counts)}
        state = RunState(state.tensors | tensors, state.data | data)
        if self._round is None or not self._under_way:
            gone = ("start.", "reference.")
            kept = {name: value for name, value in state.tensors.items() if not name.startswith(gone)}
            return RunState(kept, state.data)
        tensors, data = self._round.state()
        return RunState(state.tensors | tensors, {**state.data, "round": data})

    def load_state(self, state: RunState) -> int:
        """See JobRun.load_state."""
        step = super().load_state(state)
        self._signs.first = dict(state.data.get("signs", {}))
        if isinstance(self._sampler, CurriculumSampler):
            self._sampler.load_state(state.data["curriculum"])
        self._counts = Counter(state.data.get("counts", {}))
        for number, groups in state.data.get("left", {}).items():
            self._left[int(number)] = self._groups_of(f"left.{number}.", state.tensors, groups)
        if "round" in state.data:
            said = self._start, self._reference
            self._enter(found := self._restored(state.tensors, state.data["round"]))
            self._start, self._reference = said
            self._number = found.number
        for data in state.data.get("ahead", ()):
            self._ahead.plan(planned_of(state.tensors, data, self._lora.copied("cpu"), self._restored))
        return step

    def _restored(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> Round | EpisodeRound:
        """The round that a checkpoint has."""
        return Round.of_state(tensors, data, self._sampler.chosen)

    def _groups_state(self, prefix: str, groups: Sequence[Group[Any]]) -> tuple[dict[str, Tensor], list[Any]]:
        """Tensors and JSON of groups that wait."""
        return groups_state(prefix, groups)

    def _groups_of(self, prefix: str, tensors: Mapping[str, Tensor], data: Sequence[Any]) -> Sequence[Group[Any]]:
        """Groups of _groups_state()."""
        return groups_of(prefix, tensors, data, self._sampler.chosen)


def _tokenized(
    host: PolicyHost, spec: GrpoJob, settings: GenerateSettings, given: Sequence[RolloutPrompt], field: str
) -> list[ScoredPrompt]:
    asked = [settings.asked(prompt) for prompt in given]
    tokens = sampled_prompts(host, spec, asked, max_tokens=settings.max_tokens, field=f"generate.{field}")
    return [ScoredPrompt(ids, asked) for ids, asked in zip(tokens, given, strict=True)]
