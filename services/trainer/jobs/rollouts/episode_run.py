"""GRPO on episodes in an environment, which are played with the engine that serves."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from services.common.jobs import GrpoJob
from services.common.jobs.kinds.environment import EnvironmentReward
from services.common.jobs.kinds.generate import GenerateSettings
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.rollouts.completion_run import RolloutRun
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
from services.trainer.sampling.environments.saved import episodes_of, episodes_state
from services.trainer.sampling.environments.world import Worlds
from services.trainer.sampling.prompts import sample_seed
from services.trainer.sampling.rounds.changing import ChangingStream
from services.trainer.sampling.rounds.groups import Group, ScoredPrompt, parted
from services.trainer.sampling.rounds.newest import NewestPolicy, PolicyAt
from services.trainer.sampling.sampled import Sampled
from services.trainer.timers import StepTimer


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
        worlds = self._worlds(environment, host, f"generate.reward[{settings.reward.index(environment)}]")
        self._player = Player(
            host.codec, spec, environment, worlds, most_tokens=self._limit, max_tokens=settings.max_tokens
        )
        super().__init__(spec, host, parent, settings=settings, **rest)

    def _worlds(self, environment: EnvironmentReward, host: PolicyHost, where: str) -> Worlds:
        """Where its episodes are played. Raises InvalidRequest for a URL that is not allowed."""
        kind = OpenEnvWorlds if environment.tools is None else ToolWorlds
        return kind(environment, host.grants.webhooks, where)

    def _most_tokens(self, prompt: ScoredPrompt) -> int:
        del prompt
        return self._limit

    @property
    def _longest(self) -> int:
        return self._job.max_completion_length or min(self._generate.most_sampled, self._limit)

    def _sample_round(self, number: int, policy: PolicyAt, watch: StepTimer, interrupt: Callable[[], None]) -> Sampled:
        """Plays a round. An episode that was cut begins again, with the same seeds: others would choose short ones."""
        groups = self._to_sample(number, None)
        starts = [
            start
            for group in groups
            for start, one in zip(
                self._starts(group.prompt, (group.number, group.place), len(group.members)), group.members, strict=True
            )
            if one is None
        ]
        some, changed = self._play(
            starts, self._generate.temperature, policy, watch, interrupt, self._enough(len(starts)), self._newest
        )
        played = [one for one in some if one is not None]
        new = ended(played, self._environment)
        found = iter(some)
        groups = [
            replace(group, members=[next(found) if one is None else one for one in group.members]) for group in groups
        ]
        left = parted(groups, lambda one: one is None, self._requeues_of(number))
        with watch.waiting("score"):
            self._judge(
                [(group.prompt, one) for group in left.whole for one in group.members if isinstance(one, Episode)],
                interrupt,
            )
        made = made_round(number, policy.version, self._generate.temperature, self._environment, left.whole)
        tokens = sum(len(action.token_ids) for one in new for action in one.actions)
        return self._sampled_of(made, left, tokens, changed, watch, **failure_metrics(played))

    def _tools(self, prompt: ScoredPrompt) -> Sequence[Mapping[str, Any]]:
        """Those that a prompt is rendered with."""
        return self._generate.asked(prompt.asked).tools or ()

    def _starts(self, prompt: ScoredPrompt, drawn: Sequence[int | str], count: int) -> list[Start]:
        """So many episodes from the same state."""
        seed = sample_seed(self._job.seed, "reset", *drawn) % 2**31
        reset = {"seed": seed} | (prompt.asked.reset or {})
        tools = self._tools(prompt)
        return [
            Start(prompt.asked, tools, reset, sample_seed(self._job.seed, *drawn, member)) for member in range(count)
        ]

    def _play(
        self,
        starts: Sequence[Start],
        temperature: float,
        policy: PolicyAt,
        watch: StepTimer,
        interrupt: Callable[[], None],
        enough: int | None = None,
        newest: NewestPolicy | None = None,
    ) -> tuple[list[Episode | Dropped | None], int]:
        """Episodes, as Player.play says, and how often one went on with a newer policy."""
        if not starts:
            return [], 0
        stops = frozenset(self._generate.stop_token_ids)
        stream = ChangingStream(self._host.rollouts, temperature, stops, newest, interrupt)
        with contextlib.closing(stream):
            with watch.waiting("swap"):
                stream.use(policy)
            with watch.waiting("rollout"):
                return self._player.play(starts, stream, interrupt, enough), stream.changed

    def _judge(self, episodes: Sequence[tuple[ScoredPrompt, Episode]], interrupt: Callable[[], None]) -> None:
        """Scores by the rewards that read the last answer."""
        if not episodes:
            return
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
        with self._scoring:
            scores = self._reward.score(samples, interrupt)
        for (_, episode), score in zip(episodes, scores, strict=True):
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
        policy = PolicyAt(0, self._lora)
        some, _ = self._play(starts, 0.0, policy, StepTimer(self._host.model.device), interrupt)
        found = [one for one in some if one is not None]
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

    def _restored(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> EpisodeRound:
        return EpisodeRound.of_state(tensors, data)

    def _groups_state(self, prefix: str, groups: Sequence[Group[Any]]) -> tuple[dict[str, Tensor], list[Any]]:
        return episodes_state(prefix, groups)

    def _groups_of(self, prefix: str, tensors: Mapping[str, Tensor], data: Sequence[Any]) -> Sequence[Group[Any]]:
        return episodes_of(prefix, tensors, data, self._host.codec, self._sampler.chosen, self._tools)
