"""GRPO that samples its own rollouts: generate → score → train, for some rounds, with the engine that serves.

The first step of a round samples and scores (services/trainer/jobs/rounds.py). Groups without spread are left out. A
round may have none with spread: its steps change nothing, and the job goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoGroup, GrpoJob
from services.common.jobs.fields.messages import as_turns
from services.common.jobs.kinds.generate import GenerateSettings, RolloutPrompt
from services.common.jobs.scorers.registry import Rewards
from services.common.jobs.scorers.sample import Sample, without_thinking
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import Completion, RolloutRequest
from services.trainer.jobs.base import RunState
from services.trainer.jobs.grpo_run import GrpoRun
from services.trainer.jobs.rounds import RoundRun, Rounds
from services.trainer.sampling.prompts import check_stop_tokens, sample_seed, sampled_prompts
from services.trainer.sampling.reward_signs import RewardSigns
from services.trainer.sampling.round import Round, ScoredPrompt
from services.trainer.sampling.round_sampler import RoundSampler
from services.trainer.sampling.scored_rollouts import RewardStats, ScoredRollouts, gather

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
        self._round: Round | None = None
        self._signs = RewardSigns()
        per_step = min(spec.groups_per_step or settings.round_prompts, settings.round_prompts)
        per_epoch = -(-settings.round_prompts // per_step)
        sampler = RoundSampler(
            host.rollouts,
            prompts,
            size=settings.round_prompts,
            seed=spec.seed,
            max_tokens=settings.max_tokens,
            stop_token_ids=settings.stop_token_ids,
        )
        rounds = Rounds(settings.rounds, spec.epochs, per_epoch, settings.eval_every)
        self._plan_rounds(rounds, sampler, settings.temperature, held_out)
        longest = sorted((len(prompt.token_ids) + settings.max_tokens for prompt in prompts), reverse=True)
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
            rewards=Rewards(settings.reward, host.grants),
        )

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
        metrics |= self._round.metrics()
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
        self._enter(Round(number, self._generate.temperature, chosen, found, rewards))

    def _enter(self, found: Round) -> None:
        self._use(gather(self._host, self._job, found.groups()))
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
        state = RunState(state.tensors, {**state.data, "signs": dict(self._signs.first)})
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
        if "round" in state.data:
            said = self._start, self._reference
            number = int(state.data["round"]["number"])
            self._enter(Round.of_state(state.tensors, state.data["round"], self._sampler.chosen(number)))
            self._start, self._reference = said
            self._number = number
        return step


def _tokenized(
    host: PolicyHost, spec: GrpoJob, settings: GenerateSettings, given: Sequence[RolloutPrompt], field: str
) -> list[ScoredPrompt]:
    tokens = sampled_prompts(host, spec, given, max_tokens=settings.max_tokens, field=f"generate.{field}")
    return [ScoredPrompt(ids, asked) for ids, asked in zip(tokens, given, strict=True)]


def prepare(spec: GrpoJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> GrpoRun:
    """The run of a GRPO job: on the rollouts that it has, or on those that it samples.

    Raises:
        InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
    """
    return (GrpoRun if spec.generate is None else RolloutRun).prepare(spec, host, parent)
