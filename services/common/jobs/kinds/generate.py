"""A job that samples its own rollouts: prompts, rounds, and how to score what comes."""

from __future__ import annotations

from operator import not_
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs.base import JobBase, ServedLimits
from services.common.jobs.documents import placed
from services.common.jobs.fields.curriculum import Curriculum
from services.common.jobs.fields.cut import Cut
from services.common.jobs.fields.prompts import SampledPrompt, as_prompt
from services.common.jobs.kinds.environment import EnvironmentReward, check_tools
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.of_rewards.penalties import LengthPenalty
from services.common.jobs.scorers.registry import RewardSpec, needs_answer
from services.common.jobs.token_checks import asked_tokens, check_conversation, check_free, check_room, check_vocabulary
from services.common.validation.json_rules import (
    SOME,
    Rule,
    Rules,
    both,
    contains,
    either,
    given,
    has,
    if_any,
    items,
    left_out,
    never,
    only_with,
    where,
)
from services.common.validation.strict_models import SentModel, absent


def _as_text(value: Any) -> Any:
    # JSON writes many answers as numbers; True is none.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class RolloutPrompt(SampledPrompt):
    """One prompt, as text, as a conversation or as token ids, and what its rewards compare with."""

    answer: Annotated[str | None, BeforeValidator(_as_text, json_schema_input_type=str | float | None)] = None
    metadata: dict[str, str] = Field(default_factory=dict)
    """Handed to webhooks as it is."""
    reset: dict[str, Any] | None = Field(None, exclude_if=absent)
    """What the environment's reset gets, `seed` for example. Without a seed all completions of the prompt get one that
    the job's seed and the round decide."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


Prompt = Annotated[RolloutPrompt, BeforeValidator(as_prompt, json_schema_input_type=str | RolloutPrompt)]


JobReward = Annotated[RewardSpec | EnvironmentReward, Field(discriminator="type")]
"""Settings of a reward; `type` says which."""
_Rewards = Annotated[list[JobReward], Field(min_length=1, max_length=16)]


_AHEAD: Rule = {"type": "integer", "minimum": 1}
_COMPARES = needs_answer()
_EPISODES: Rule = has(type="environment")
_WITH_TOOLS = both(_EPISODES, given("tools"))


def _rewarded(rule: Rule) -> Rule:
    """A reward is so, the only one or one of several."""
    return has(reward=either(rule, contains(rule)))


IN_TURNS = _rewarded(both(_EPISODES, if_any(max_turns={"type": "integer", "minimum": 2})))
"""Rollouts may have several turns."""


def _not_rewarded(rule: Rule) -> Rule:
    """No reward is so."""
    return if_any(reward=both(never(rule), items(never(rule))))


def _prompts(rule: Rule) -> Rule:
    """Every prompt is so."""
    return if_any(prompts=items(rule), eval_prompts=items(rule))


class GenerateSettings(SentModel):
    """Each round: `completions` samples of each of `prompts_per_round` prompts by the policy as it is then, their
    rewards, and the job's optimizer steps on them."""

    prompts: list[Prompt] = Field(min_length=1)
    rounds: int = Field(ge=1, le=100_000)
    prompts_per_round: int | None = Field(None, ge=1)
    """None: all of them. They are taken in shuffled order, each once before one comes again."""
    curriculum: Curriculum | None = Field(None, exclude_if=absent)
    """Rounds draw their prompts by how often they have been answered well, instead."""
    completions: int = Field(8, ge=2, le=1024)
    """Completions of each prompt: they are compared with each other."""
    max_tokens: int = Field(ge=1)
    """Most tokens of each completion; in an environment, of each answer. One that is cut off is scored as it is."""
    temperature: float = Field(1.0, gt=0, le=100)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """End a completion, besides the model's own end tokens."""
    reward: Annotated[_Rewards, BeforeValidator(_as_list, json_schema_input_type=JobReward | _Rewards)]
    """One, or several whose weighted scores are added. With an environment, each completion is an episode in it."""
    eval_prompts: list[Prompt] = Field(default_factory=list)
    """Held out: answered greedily and scored before the first round and every eval_every rounds."""
    staleness: int = Field(0, ge=0, le=8, exclude_if=not_)
    """Rounds that are sampled ahead, while the trainer takes the steps of an earlier one: the policy that samples a
    round has not been trained on so many of those before it. 0: sampling and training take turns."""
    in_flight: Literal["keep", "change"] = Field("keep", exclude_if=lambda value: value == "keep")
    """Policy of the rollouts that are under way when the trainer has taken a step. keep: the one that they began with;
    change: they go on with the new one, which reads again what they have so far."""
    cut: Cut | None = Field(None, exclude_if=absent)
    """Rounds end before their slowest rollouts have; None: every rollout is waited for."""
    eval_every: int | None = Field(None, ge=1)
    """Rounds; None: after the last one only."""

    json_rules: ClassVar[Rules] = (
        only_with("eval_every", has(eval_prompts=SOME)),
        only_with("curriculum", given("prompts_per_round")),
        where(has(in_flight="change"), has(staleness=_AHEAD)),
        where(has(staleness=_AHEAD), has(rounds={"type": "integer", "minimum": 2})),
        where(
            has(reward=either(_COMPARES, contains(_COMPARES))),
            if_any(prompts=items(given("answer")), eval_prompts=items(given("answer"))),
        ),
        if_any(reward={"contains": _EPISODES, "minContains": 0, "maxContains": 1}),
        never(has(reward=either(_WITH_TOOLS, {"type": "array", "maxItems": 1, "contains": _WITH_TOOLS}))),
        # Said as alternatives: makers of values from schemas give up on as many denials as these would be.
        either(_not_rewarded(_EPISODES), _prompts(left_out("prompt_token_ids"))),
        either(_not_rewarded(_WITH_TOOLS), _prompts(left_out("tools"))),
        where(never(_rewarded(both(_EPISODES, given("url")))), _prompts(left_out("reset"))),
    )

    @model_validator(mode="after")
    def _consistent(self) -> GenerateSettings:
        if self.prompts_per_round is not None and self.prompts_per_round > len(self.prompts):
            raise ValueError(
                f"prompts_per_round is {self.prompts_per_round}, but there are {len(self.prompts)} prompts"
            )
        if self.curriculum is not None and self.round_prompts == len(self.prompts):
            raise ValueError(
                f"curriculum would choose nothing: prompts_per_round is {self.round_prompts}, but there are "
                f"{len(self.prompts)} prompts: give more prompts, or fewer a round"
            )
        if self.in_flight == "change" and not self.staleness:
            raise ValueError(
                'in_flight "change" would do nothing: with staleness 0 no rollout is under way while the trainer takes '
                "a step: set staleness to 1 or more"
            )
        if self.staleness and self.rounds == 1:
            raise ValueError(
                "staleness would do nothing: rounds is 1, and there is none to sample ahead: leave staleness out"
            )
        rollouts = self.round_prompts * self.completions
        if self.cut is not None and self.cut.enough(rollouts) == rollouts:
            raise ValueError(
                f"cut would do nothing: its fraction {self.cut.fraction:g} of the {rollouts} rollouts of a round, "
                "rounded up, is all of them: lower it, or leave cut out"
            )
        if self.eval_every is not None and not self.eval_prompts:
            raise ValueError("eval_every needs eval_prompts")
        self._check_environment()
        needed = next((reward.type for reward in self.reward if reward.needs_answer), None)
        for field, prompts in (("prompts", self.prompts), ("eval_prompts", self.eval_prompts)):
            for index, prompt in enumerate(prompts):
                if needed is not None and prompt.answer is None:
                    raise ValueError(f"{field}[{index}] has no answer, which the {needed} reward compares with")
                for reason in filter(None, (reward.wrong_answer(prompt.answer or "") for reward in self.reward)):
                    raise ValueError(f"{field}[{index}].answer is {(prompt.answer or '')[:80]!r}: {reason}")
        return self

    def _check_environment(self) -> None:
        environments = [reward for reward in self.reward if isinstance(reward, EnvironmentReward)]
        if len(environments) > 1:
            raise ValueError("reward has several environments, and an episode is in one")
        environment = self.environment
        if environment is not None and environment.tools is not None and not self.scored:
            raise ValueError("reward: tools give none: add a reward that reads the last answer")
        for field, prompts in (("prompts", self.prompts), ("eval_prompts", self.eval_prompts)):
            for index, prompt in enumerate(prompts):
                if prompt.reset is not None and (environment is None or environment.url is None):
                    raise ValueError(f"{field}[{index}].reset would do nothing: reward has no environment with a url")
                if environment is not None and prompt.prompt_token_ids is not None:
                    raise ValueError(
                        f"{field}[{index}].prompt_token_ids: what an environment says is rendered behind prompt or "
                        "messages: give one of those"
                    )
                if environment is not None and environment.tools is not None and prompt.tools is not None:
                    raise ValueError(f"{field}[{index}].tools: the tools of the reward are those of every prompt")

    def check_used(self) -> None:
        """Checks that every penalty may be due. Raises InvalidRequest."""
        for index, reward in enumerate(self.reward):
            if isinstance(reward, LengthPenalty) and reward.free >= self.most_sampled:
                name = f"generate.reward[{index}].free"
                raise InvalidRequest(
                    f"{name} is {reward.free}, but the completion may have at most {self.most_sampled} tokens, so that "
                    "the penalty would do nothing: lower free, or leave the reward out",
                    param=name,
                )

    @property
    def environment(self) -> EnvironmentReward | None:
        """The environment that completions are episodes in; None: they are answers."""
        return next((reward for reward in self.reward if isinstance(reward, EnvironmentReward)), None)

    @property
    def scored(self) -> list[ScorerSpec]:
        """The rewards that read a completion's text."""
        return [reward for reward in self.reward if isinstance(reward, ScorerSpec)]

    def asked(self, prompt: RolloutPrompt) -> RolloutPrompt:
        """The prompt with the tools that it is rendered with."""
        tools = None if self.environment is None else self.environment.definitions
        return prompt if tools is None else prompt.model_copy(update={"tools": tools})

    @property
    def turns(self) -> int:
        """Answers of one rollout, at most."""
        return 1 if self.environment is None else self.environment.max_turns

    @property
    def most_sampled(self) -> int:
        """Tokens of all answers of one rollout, at most."""
        most = self.max_tokens * self.turns
        limit = None if self.environment is None else self.environment.max_trajectory_tokens
        return most if limit is None else min(most, limit)

    @property
    def round_prompts(self) -> int:
        """Prompts of one round."""
        return self.prompts_per_round or len(self.prompts)


def check_rewards(settings: GenerateSettings) -> None:
    """Compiles every pattern with every answer, and every schema.

    Raises:
        InvalidRequest: one cannot be used; names it.
    """
    answers = [
        (f"generate.{field}[{index}].answer", prompt.answer)
        for field, prompts in (("prompts", settings.prompts), ("eval_prompts", settings.eval_prompts))
        for index, prompt in enumerate(prompts)
    ]
    for index, reward in enumerate(settings.reward):
        reward.check(f"generate.reward[{index}]", answers)


def check_generate(served: ServedLimits, job: JobBase, settings: GenerateSettings) -> None:
    """Every prompt leaves room for its completion, and every reward can be computed.

    Raises:
        InvalidRequest: see JobBase.check_tokens.
    """
    check_vocabulary(served, "generate.stop_token_ids", settings.stop_token_ids)
    for field, prompts in (("prompts", settings.prompts), ("eval_prompts", settings.eval_prompts)):
        for index, prompt in enumerate(prompts):
            name = f"generate.{field}[{index}]"
            check_conversation(name, prompt.messages, prompt.tools, messages="messages")
            check_conversation(name, prompt.prompt, None, messages="prompt")
            check_vocabulary(served, f"{name}.prompt_token_ids", prompt.prompt_token_ids or ())
            with placed(name):
                tokens = asked_tokens(served, job, settings.asked(prompt))
            check_room(served, name, len(tokens), settings.max_tokens)
            if settings.environment is not None:
                check_free(f"{name}.reset", prompt.reset)
                check_tools(prompt.tools or (), f"{name}.tools")
                _check_beginning(name, len(tokens), settings.environment)
    check_rewards(settings)
    if settings.environment is not None:
        _check_episodes(served, job, settings.environment)


def _check_beginning(name: str, tokens: int, environment: EnvironmentReward) -> None:
    """A prompt leaves room for an answer, even if the environment shows nothing."""
    most = environment.max_trajectory_tokens
    if most is not None and tokens >= most:
        raise InvalidRequest(
            f"{name} has {tokens} tokens, and max_trajectory_tokens of the environment is {most}, which leaves no room "
            "for an answer: raise it, or shorten the prompt",
            param=name,
        )


def _check_episodes(served: ServedLimits, job: JobBase, environment: EnvironmentReward) -> None:
    for index, tool in enumerate(environment.tools or ()):
        check_free(f"generate.reward.tools[{index}].parameters", tool.parameters)
    if job.prompt_format == "raw":
        raise InvalidRequest(
            "prompt_format raw has no turns, and an environment's observations are turns: use chat",
            param="prompt_format",
        )
    most, limit = environment.max_trajectory_tokens, served.max_train_tokens
    if most is not None and limit and most > limit:
        raise InvalidRequest(
            f"generate.reward.max_trajectory_tokens is {most} and the limit for training is {limit} tokens: lower it",
            param="generate.reward.max_trajectory_tokens",
        )
