"""GRPO that samples its own rollouts: generate → score → train, for some rounds, with the engine that serves.

The first step of a round samples and scores (services/trainer/jobs/rounds.py). Groups without spread are left out. A
round may have none with spread: its steps change nothing, and the job goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoGroup, GrpoJob
from services.common.jobs.fields.messages import as_turns
from services.common.jobs.kinds.generate import GenerateSettings, RolloutPrompt
from services.common.jobs.scorers.registry import Rewards
from services.common.jobs.scorers.sample import Sample, without_thinking
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import Completion, RolloutRequest, sampling_rate
from services.trainer.jobs.base import RunState
from services.trainer.jobs.grpo_run import GrpoRun
from services.trainer.jobs.rounds import RoundRun, Rounds
from services.trainer.sampling.curriculum import CurriculumSampler
from services.trainer.sampling.environments.episodes import Dropped, Episode, Player, Start
from services.trainer.sampling.environments.http_tools import ToolWorlds
from services.trainer.sampling.environments.openenv import OpenEnvWorlds
from services.trainer.sampling.environments.rounds import (
    EpisodeRound,
    ended,
    episode_metrics,
    failure_metrics,
    made_round,
)
from services.trainer.sampling.prompts import check_stop_tokens, sample_seed, sampled_prompts
from services.trainer.sampling.reward_signs import RewardSigns, drift
from services.trainer.sampling.round import Round, ScoredPrompt
from services.trainer.sampling.round_sampler import RoundSampler
from services.trainer.sampling.scored_rollouts import RewardStats, ScoredRollouts, gather
from services.trainer.timers import StepTimer

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
        self._round: Round | EpisodeRound | None = None
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
        one that sampled."""
        if not self._is_first(index):
            return {}
        return {at: one.behaviour for at, one in enumerate(self._rollouts) if one.behaviour is not None}

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

    def _requests(self, number: int) -> list[RolloutRequest]:
        return [
            RolloutRequest(prompt.token_ids, sample_seed(self._job.seed, number, place, member))
            for place, prompt in enumerate(self._sampler.chosen(number))
            for member in range(self._generate.completions)
        ]

    def _receive(self, number: int, found: list[Completion], interrupt: Callable[[], None]) -> None:
        chosen = self._sampler.chosen(number)
        prompts = [prompt for prompt in chosen for _ in range(self._generate.completions)]
        with self.watch.waiting("score"):
            rewards = self._score(prompts, found, interrupt)
        self._enter(made := Round(number, self._generate.temperature, chosen, found, rewards))
        self._show(made)

    def _show(self, found: Round | EpisodeRound) -> None:
        """Tells the curriculum what has become of a round's prompts."""
        if isinstance(self._sampler, CurriculumSampler):
            self._sampler.learn(found.number, found.earned)

    def _enter(self, found: Round | EpisodeRound) -> None:
        groups = found.groups()
        self._use(gather(self._host, self._job, groups))
        self._drift = drift(groups)
        self._round = found

    def _score(
        self, prompts: Sequence[ScoredPrompt], found: Sequence[Completion], interrupt: Callable[[], None]
    ) -> list[float]:
        samples = [self._as_sample(prompt, completion) for prompt, completion in zip(prompts, found, strict=True)]
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
        """See JobRun.state: with the rollouts of a round that is under way."""
        state = super().state()
        drawn = {"curriculum": self._sampler.state()} if isinstance(self._sampler, CurriculumSampler) else {}
        state = RunState(state.tensors, {**state.data, "signs": dict(self._signs.first), **drawn})
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
        if "round" in state.data:
            said = self._start, self._reference
            self._enter(found := self._restored(state))
            self._start, self._reference = said
            self._number = found.number
        return step

    def _restored(self, state: RunState) -> Round | EpisodeRound:
        """The round that a checkpoint has."""
        data = state.data["round"]
        return Round.of_state(state.tensors, data, self._sampler.chosen(int(data["number"])))


class EpisodeRun(RolloutRun):
    """A prepared GRPO job whose completions are episodes in an environment; see `prepare`."""

    def __init__(
        self,
        spec: GrpoJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        settings: GenerateSettings,
        **rest: Any,
    ) -> None:
        environment = settings.environment
        if environment is None:
            raise ValueError("the job has no environment")
        self._environment = environment
        self._limit = min(environment.max_trajectory_tokens or host.max_train_tokens, host.max_train_tokens)
        place = settings.reward.index(environment)
        worlds = (OpenEnvWorlds if environment.tools is None else ToolWorlds)(
            environment, host.grants.webhooks, f"generate.reward[{place}]"
        )
        self._player = Player(
            host.codec, spec, environment, worlds, most_tokens=self._limit, max_tokens=settings.max_tokens
        )
        super().__init__(spec, host, parent, settings=settings, **rest)

    def _most_tokens(self, prompt: ScoredPrompt) -> int:
        del prompt
        return self._limit

    @property
    def _longest(self) -> int:
        return self._job.max_completion_length or self._generate.max_tokens * self._environment.max_turns

    def _begin(self, number: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Plays a round; returns the metrics of its speed and of what failed."""
        chosen = self._sampler.chosen(number)
        starts = [
            start
            for place, prompt in enumerate(chosen)
            for start in self._starts(prompt, (number, place), self._generate.completions)
        ]
        found = self._play(starts, self._generate.temperature, self.watch, interrupt)
        left = ended(found, self._environment)
        prompts = {id(one): chosen[at // self._generate.completions] for at, one in enumerate(found)}
        with self.watch.waiting("score"):
            self._judge([(prompts[id(one)], one) for one in left], interrupt)
        size = self._generate.completions
        members = [found[at : at + size] for at in range(0, len(found), size)]
        self._enter(made := made_round(number, self._generate.temperature, self._environment, members))
        self._show(made)
        self._number = number
        return failure_metrics(found) | sampling_rate([action for one in left for action in one.actions], self.watch)

    def _starts(self, prompt: ScoredPrompt, drawn: Sequence[int | str], count: int) -> list[Start]:
        """So many episodes from the same state."""
        seed = sample_seed(self._job.seed, "reset", *drawn) % 2**31
        reset = {"seed": seed} | (prompt.asked.reset or {})
        tools = self._generate.asked(prompt.asked).tools or ()
        return [
            Start(prompt.asked, tools, reset, sample_seed(self._job.seed, *drawn, member)) for member in range(count)
        ]

    def _play(
        self, starts: Sequence[Start], temperature: float, watch: StepTimer, interrupt: Callable[[], None]
    ) -> list[Episode | Dropped]:
        source = self._host.rollouts
        with ExitStack() as stack:
            with watch.waiting("swap"):
                policy = stack.enter_context(source.policy(self._lora, interrupt))
            with watch.waiting("rollout"):
                stops = frozenset(self._generate.stop_token_ids)
                stream = stack.enter_context(source.stream(temperature, stops, policy))
                return self._player.play(starts, stream, interrupt)

    def _judge(self, episodes: Sequence[tuple[ScoredPrompt, Episode]], interrupt: Callable[[], None]) -> None:
        """Scores by the rewards that read the last answer."""
        samples = [
            replace(
                self._as_sample(prompt, episode.actions[-1]),
                prompt=self._host.codec.decode(episode.prompt, skip_special=False),
                tokens=sum(len(action.token_ids) for action in episode.actions),
                truncated=episode.truncated,
                said=None if episode.answer is None else episode.answer.text,
                tool_calls=() if episode.answer is None else episode.answer.calls,
            )
            for prompt, episode in episodes
        ]
        for (_, episode), score in zip(episodes, self._reward.score(samples, interrupt), strict=True):
            episode.others = score

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.evaluate: greedy episodes from the held-out prompts, their mean reward as ``eval_reward`` and the
        share of successes as ``eval_success``. Episodes that are dropped are in neither."""
        if not self._held_out:
            return {}
        started = time.perf_counter()
        starts = [
            start
            for place, prompt in enumerate(self._held_out)
            for start in self._starts(prompt, ("held out", place), 1)
        ]
        found = self._play(starts, 0.0, StepTimer(self._host.model.device), interrupt)
        left = ended(found, self._environment)
        prompts = {id(one): prompt for one, prompt in zip(found, self._held_out, strict=True)}
        self._judge([(prompts[id(one)], one) for one in left], interrupt)
        said = episode_metrics(found, self._environment)
        total = math.fsum(self._environment.weight * one.gained + one.others for one in left)
        return {
            "eval_reward": total / len(left),
            "eval_success": said["environment_success"],
            "eval_turns": said["environment_turns"],
            "eval_dropped": float(len(found) - len(left)),
            "eval_seconds": time.perf_counter() - started,
        }

    def _restored(self, state: RunState) -> EpisodeRound:
        return EpisodeRound.of_state(state.tensors, state.data["round"])


def _tokenized(
    host: PolicyHost, spec: GrpoJob, settings: GenerateSettings, given: Sequence[RolloutPrompt], field: str
) -> list[ScoredPrompt]:
    asked = [settings.asked(prompt) for prompt in given]
    tokens = sampled_prompts(host, spec, asked, max_tokens=settings.max_tokens, field=f"generate.{field}")
    return [ScoredPrompt(ids, asked) for ids, asked in zip(tokens, given, strict=True)]


def prepare(spec: GrpoJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> GrpoRun:
    """The run of a GRPO job: on the rollouts that it has, or on those that it samples.

    Raises:
        InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
    """
    if spec.generate is None:
        return GrpoRun.prepare(spec, host, parent)
    return (RolloutRun if spec.generate.environment is None else EpisodeRun).prepare(spec, host, parent)
