"""GRPO on episodes in an environment, which are played with the engine that serves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from services.common.jobs import GrpoJob
from services.common.jobs.kinds.generate import GenerateSettings
from services.engine.models.lora.trainable import LoraParams
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
from services.trainer.sampling.prompts import sample_seed
from services.trainer.sampling.round import ScoredPrompt
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

    def _sample_round(
        self, number: int, version: int, policy: LoraParams, watch: StepTimer, interrupt: Callable[[], None]
    ) -> Sampled:
        """Plays a round."""
        chosen = self._sampler.chosen(number)
        starts = [
            start
            for place, prompt in enumerate(chosen)
            for start in self._starts(prompt, (number, place), self._generate.completions)
        ]
        found = self._play(starts, self._generate.temperature, policy, watch, interrupt)
        left = ended(found, self._environment)
        prompts = {id(one): chosen[at // self._generate.completions] for at, one in enumerate(found)}
        with watch.waiting("score"):
            self._judge([(prompts[id(one)], one) for one in left], interrupt)
        size = self._generate.completions
        members = [found[at : at + size] for at in range(0, len(found), size)]
        made = made_round(number, version, self._generate.temperature, self._environment, members)
        return Sampled.of(made, [action for one in left for action in one.actions], watch, failure_metrics(found))

    def _starts(self, prompt: ScoredPrompt, drawn: Sequence[int | str], count: int) -> list[Start]:
        """So many episodes from the same state."""
        seed = sample_seed(self._job.seed, "reset", *drawn) % 2**31
        reset = {"seed": seed} | (prompt.asked.reset or {})
        tools = self._generate.asked(prompt.asked).tools or ()
        return [
            Start(prompt.asked, tools, reset, sample_seed(self._job.seed, *drawn, member)) for member in range(count)
        ]

    def _play(
        self,
        starts: Sequence[Start],
        temperature: float,
        lora: LoraParams,
        watch: StepTimer,
        interrupt: Callable[[], None],
    ) -> list[Episode | Dropped]:
        source = self._host.rollouts
        with ExitStack() as stack:
            with watch.waiting("swap"):
                policy = stack.enter_context(source.policy(lora, interrupt))
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
        found = self._play(starts, 0.0, self._lora, StepTimer(self._host.model.device), interrupt)
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
