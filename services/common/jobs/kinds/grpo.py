"""Group-relative policy optimisation: the request, and its checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import not_
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from services.common.adapters.composition import parse_policy, versions_of
from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest
from services.common.jobs.base import DataRows, JobBase, Pace, ServedLimits
from services.common.jobs.documents import placed
from services.common.jobs.fields.dataset import OfDataset
from services.common.jobs.fields.drafter import RefreshesDrafter
from services.common.jobs.fields.messages import SAYS, Message, check_asks
from services.common.jobs.kinds.generate import IN_TURNS, GenerateSettings, check_generate
from services.common.jobs.kinds.loss_types import LOSS_TYPES, LossType
from services.common.jobs.kinds.rollouts import (
    MOST_SAMPLERS,
    GrpoCompletion,
    GrpoGroup,
    ScoredCompletion,
    check_spread,
    check_unmasked,
    group_of_row,
    rollout_tokens,
)
from services.common.jobs.scorers.base import ScorerSettings
from services.common.jobs.token_checks import (
    asked_tokens,
    check_conversation,
    check_segments,
    check_vocabulary,
    over_limit,
)
from services.common.jobs.trajectories.credit import AdvantageLevel, Credit
from services.common.jobs.trajectories.documents import trajectory_documents
from services.common.jobs.trajectories.segments import Reward
from services.common.jobs.trajectories.stored import StoredTrajectory
from services.common.validation.json_rules import (
    NOT_NULL,
    SOME,
    Rules,
    both,
    contains,
    either,
    given,
    has,
    if_any,
    left_out,
    never,
    only_with,
    true_only_with,
    where,
)
from services.common.validation.strict_models import absent

DEFAULT_LOSS_TYPE = LossType("dapo")
MismatchCorrection: TypeAlias = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
RewardScale: TypeAlias = Literal["group", "batch", "none"]


def _scale_of_flag(value: object) -> object:
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


def _by_trajectory(value: object) -> bool:
    return value == "trajectory"


def _undiscounted(value: object) -> bool:
    return value == 1.0


_SIMPLE = ("prompt", "completions", "rewards", "truncated", "temperature")
"""Fields of the simple form: one group of texts."""


class GrpoJob(RefreshesDrafter, OfDataset, JobBase):
    """Group-relative policy optimisation on scored rollouts.

    Four ways to give the rollouts, which may not be mixed: `prompt` + `completions` + `rewards` (one group of texts),
    `groups`, `rollouts` of completion ids (grouped by equal prompt), or a `dataset`. Or none: with `generate` the job
    samples and scores them itself, round after round.
    """

    kind: Literal["grpo"] = "grpo"
    prompt: str | list[Message] | None = None
    completions: list[str] | None = None
    rewards: list[Reward] | None = None
    truncated: list[bool] | None = Field(None, exclude_if=absent)
    """Whether each of `completions` hit max_tokens (`finish_reason` "length"). Left out: not known, and the
    token that ends a completion is not learnt."""
    temperature: float | None = Field(None, ge=0, le=100, exclude_if=absent)
    """Temperature that `completions` were sampled at. None: 1."""
    groups: list[GrpoGroup] | None = None
    rollouts: list[ScoredCompletion] | None = None
    generate: GenerateSettings | None = None
    epochs: int = Field(1, ge=1, le=100)
    """Passes over the rollouts; with `generate`, over each round's."""
    groups_per_step: int | None = Field(None, ge=1)
    """Groups an optimizer step; None: all of them."""
    loss_type: LossType = DEFAULT_LOSS_TYPE
    """Loss type: what is clipped and what the sum over tokens is divided by. docs/guides/training/grpo.md has the
    formulas."""
    clip_low: float = Field(default_factory=lambda given: _clip(given, 0), ge=0, lt=1)
    """The ratio counts from 1 - clip_low on. Default 0.2, of gspo 0.0003."""
    clip_high: float = Field(default_factory=lambda given: _clip(given, 1), ge=0, le=1e3)
    """The ratio counts up to 1 + clip_high. Default 0.28, of gspo 0.0004."""
    cispo_max_ratio: float = Field(5.0, gt=0, le=1e3)
    """Upper bound of the ratio as a weight of cispo, which has no other bound."""
    max_completion_length: int | None = Field(None, ge=1)
    """dr_grpo divides by it: the `max_tokens` of the rollouts. None: the longest completion of the job."""
    mask_truncated: bool = False
    """Truncated completions count in their group's baseline, and nothing is learnt from their tokens."""
    beta: float = Field(0.0, ge=0, le=100)
    """Weight of the k3 KL to the base model without adapter."""
    unbiased_kl: bool = False
    """Multiply the KL estimate by the ratio, so that its gradient is that of the KL also off policy."""
    scale_rewards: Annotated[
        RewardScale, BeforeValidator(_scale_of_flag, json_schema_input_type=bool | RewardScale)
    ] = "group"
    """Divide the advantage by the standard deviation of the group's rewards, of all rewards of the job (batch), or not
    at all. true means group, false none."""
    least_reward_std: float = Field(0.0, ge=0, le=1e9, exclude_if=not_)
    """Groups whose rewards have a smaller standard deviation are skipped, as those are whose rewards are equal."""
    mismatch_correction: MismatchCorrection = "none"
    """Correction for the difference between the trainer's and the sampler's log-probabilities: weights trainer /
    sampler, of a token or a sequence, bounded (truncate) or dropped (mask) over mismatch_cap. The ratio is then against
    the trainer's."""
    mismatch_cap: float = Field(3.0, gt=0, le=1e6)
    advantage: AdvantageLevel = Field("trajectory", exclude_if=_by_trajectory)
    """What turns of a trajectory are compared by: what all of it earned, or what came from each turn on, with the same
    turn of the others. Of completions, which are one turn, both are the same."""
    discount: float = Field(1.0, ge=0, le=1, exclude_if=_undiscounted)
    """Factor a turn for rewards that come later."""
    observation_weight: float = Field(0.0, ge=0, le=10, exclude_if=not_)
    """Of trajectories: adds the cross-entropy of observations behind the first action at this weight, over the number
    of action tokens of the step."""
    exact_forward: bool = False
    """Take the values of all log-probabilities from the engine, by the sampler's own kernels, and the gradients from
    the trainer's forward: rollouts are decoded again before each step that did not sample them."""

    own_data: ClassVar[str] = "groups"
    pace: ClassVar[Pace] = Pace(4e-5)
    request_examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "groups": {
            "adapter": "sums",
            "attach": False,
            "groups": [
                {
                    "prompt": "What is 12 plus 7?",
                    "completions": [{"text": "19", "reward": 1.0}, {"text": "20", "reward": 0.0}],
                }
            ],
        }
    }
    json_rules: ClassVar[Rules] = (
        either(
            both(
                has(prompt=both(NOT_NULL, SAYS), completions=SOME, rewards=SOME),
                left_out("groups", "rollouts", "generate", "dataset"),
            ),
            both(has(groups=SOME), left_out(*_SIMPLE, "rollouts", "generate", "dataset")),
            both(has(rollouts=SOME), left_out(*_SIMPLE, "groups", "generate", "dataset")),
            both(given("generate"), left_out(*_SIMPLE, "groups", "rollouts", "dataset")),
            both(given("dataset"), left_out(*_SIMPLE, "groups", "rollouts", "generate")),
        ),
        # What would do nothing has its default.
        where(has(loss_type="cispo"), if_any(clip_low=0.2, clip_high=0.28)),
        where(if_any(loss_type={"not": {"const": "cispo"}}), if_any(cispo_max_ratio=5)),
        only_with("max_completion_length", has(loss_type="dr_grpo")),
        true_only_with("unbiased_kl", has(beta={"exclusiveMinimum": 0})),
        where(if_any(mismatch_correction="none"), if_any(mismatch_cap=3)),
        either(
            if_any(advantage="trajectory", discount=1, observation_weight=0),
            given("dataset"),
            has(generate=IN_TURNS),
            has(groups=contains(given("trajectories"))),
        ),
        where(both(given("generate"), has(exact_forward=True)), if_any(mismatch_correction="none")),
        never(has(publish_if=given("metric"))),
    )

    @model_validator(mode="before")
    @classmethod
    def _checkpoint_each_round(cls, data: Any) -> Any:
        # What a round sampled is dear and not sampled alike again beside other traffic.
        if isinstance(data, dict) and data.get("generate") is not None:
            return {"checkpoint_every": 1, **data}
        return data

    @model_validator(mode="after")
    def _one_form(self) -> GrpoJob:
        forms = [
            any(getattr(self, part) is not None for part in _SIMPLE),
            self.groups is not None,
            self.rollouts is not None,
            self.generate is not None,
            self.unread,
        ]
        if sum(forms) != 1:
            raise ValueError("give exactly one of prompt+completions+rewards, groups, rollouts, dataset, generate")
        if forms[0]:
            if self.prompt is None or self.completions is None or self.rewards is None:
                raise ValueError("prompt, completions and rewards go together")
            if not self.completions:
                raise ValueError("completions must not be empty")
            if len(self.completions) != len(self.rewards):
                raise ValueError(
                    f"completions has {len(self.completions)} entries and rewards {len(self.rewards)}: one reward each"
                )
            if self.truncated is not None and len(self.completions) != len(self.truncated):
                raise ValueError(
                    f"completions has {len(self.completions)} entries and truncated {len(self.truncated)}: one each"
                )
            check_asks(self.prompt, "prompt")
        if self.groups is not None and not self.groups:
            raise ValueError("groups must not be empty")
        if self.rollouts is not None and not self.rollouts:
            raise ValueError("rollouts must not be empty")
        return self

    @model_validator(mode="after")
    def _said_to_no_purpose(self) -> GrpoJob:
        # What a setting cannot do must not look done. By value: what the queue stores has every field.
        def default(name: str) -> Any:
            return type(self).model_fields[name].get_default(call_default_factory=True, validated_data={})

        cispo = self.loss_type == "cispo"
        for name, read, way_out in (
            ("clip_low", not cispo, "cispo bounds the ratio by cispo_max_ratio only"),
            ("clip_high", not cispo, "cispo bounds the ratio by cispo_max_ratio only"),
            ("cispo_max_ratio", cispo, "only loss_type cispo reads it; the others read clip_low and clip_high"),
            ("max_completion_length", self.loss_type == "dr_grpo", "only loss_type dr_grpo divides by it"),
            ("unbiased_kl", self.beta > 0, "it says how the KL is estimated, and beta 0 leaves the KL out"),
            ("mismatch_cap", self.mismatch_correction != "none", "only a mismatch_correction reads it"),
            ("advantage", self._has_turns, "completions, and episodes with max_turns 1, have one turn"),
            ("discount", self._has_turns, "completions, and episodes with max_turns 1, have one turn"),
            ("observation_weight", self._has_turns, "nothing is observed behind a turn that is the only one"),
            (
                "mismatch_correction",
                self.generate is None or not self.exact_forward,
                "with exact_forward the log-probabilities of what the job samples are the sampler's own",
            ),
        ):
            if not read and getattr(self, name) != default(name):
                raise ValueError(f"{name} would do nothing here: {way_out}")
        return self

    @property
    def _has_turns(self) -> bool:
        """Rollouts may have several turns."""
        return (
            (self.generate is not None and self.generate.turns > 1)
            or self.unread
            or any(group.trajectories is not None for group in self.groups or ())
        )

    @model_validator(mode="after")
    def _one_sequence(self) -> GrpoJob:
        if said := self._several_sequences():
            raise ValueError(said)
        return self

    def _several_sequences(self) -> str | None:
        """What is wrong with a trajectory of several sequences in a job whose ratios are of the whole."""
        ratio_of_all = self.loss_type == "gspo" and "loss_type gspo"
        if self.mismatch_correction.startswith("sequence"):
            ratio_of_all = f"mismatch_correction {self.mismatch_correction}"
        for place, group in enumerate(self.groups or ()):
            for index, trajectory in enumerate(group.played):
                if ratio_of_all and trajectory.restarts:
                    return (
                        f"groups[{place}].trajectories[{index}] restarts its context, and {ratio_of_all} has one ratio "
                        "for all its tokens, which must be one sequence: choose another, or give it as several "
                        "trajectories"
                    )
        return None

    @model_validator(mode="after")
    def _divides_by_enough(self) -> GrpoJob:
        length, made = self.max_completion_length, self.generate
        if length is not None and made is not None and length < made.most_sampled:
            raise ValueError(
                f"max_completion_length is {length} and generate.max_tokens {made.max_tokens}, with which a rollout "
                f"may have {made.most_sampled}: leave max_completion_length out"
            )
        return self

    @classmethod
    def data_rows(cls, rows: Sequence[Mapping[str, Any]]) -> DataRows:
        """See JobBase. Rows are {"completion_id", "reward"}, or groups as `group_of_row` reads them."""
        by_id = ["completion_id" in row for row in rows]
        if all(by_id):
            return DataRows("rollouts", ScoredCompletion)
        if any(by_id):
            raise InvalidRequest("lines with completion_id and lines with completions cannot be mixed in one job")
        return DataRows("groups", GrpoGroup, group_of_row)

    def scorers(self) -> Sequence[tuple[str, ScorerSettings]]:
        """See JobBase."""
        if self.generate is None:
            return ()
        return [(f"generate.reward[{index}]", reward) for index, reward in enumerate(self.generate.reward)]

    def check_used(self) -> None:
        """See JobBase. Given groups may be fewer than a step takes, as examples may be; those of a round always are as
        many."""
        made = self.generate
        if made is None:
            return
        if self.groups_per_step is not None and self.groups_per_step > made.round_prompts:
            raise InvalidRequest(
                f"groups_per_step is {self.groups_per_step}, but a round has {made.round_prompts} prompts: "
                "each is a group: lower it, or leave it out for one step a round",
                param="groups_per_step",
            )
        made.check_used()

    def check_tokens(self, served: ServedLimits) -> None:
        """See JobBase. Rollouts are within the limits, and there is something to learn from them."""
        if self.generate is not None:
            check_generate(served, self, self.generate)
            return
        for index, group in enumerate(self.groups or ()):
            check_conversation(f"groups[{index}]", group.messages, group.tools, messages="messages")
            check_conversation(f"groups[{index}]", group.prompt, None, messages="prompt")
        if not isinstance(self.prompt, str):
            check_conversation("prompt", self.prompt, None, messages="messages")
        if said := self._several_sequences():
            raise InvalidRequest(said, param="groups")
        groups = self.scored_groups
        check_spread(groups, self.credit)
        check_unmasked(groups, self.credit, mask_truncated=self.mask_truncated)
        for field, learnt, longest in self._counted(served):
            self._check_length(served, field, learnt, longest)

    def _counted(self, served: ServedLimits) -> Iterator[tuple[str, int, int]]:
        """Each member: its field, the tokens that are learnt, and the tokens of its longest sequence."""
        simple = self.completions is not None
        for index, group in enumerate(self.scored_groups):
            name = f"groups[{index}]"
            field = "completions" if simple else f"{name}.completions"
            with placed("prompt" if simple else name):
                prompt = asked_tokens(served, self, group)
            check_vocabulary(served, f"{name}.prompt_token_ids", group.prompt_token_ids or ())
            for position, completion in enumerate(group.completions):
                check_vocabulary(served, f"{field}[{position}].token_ids", completion.token_ids or ())
                with placed(f"{field}[{position}]"):
                    tokens = len(rollout_tokens(served.codec, self, prompt, completion))
                yield f"{field}[{position}]", tokens, len(prompt) + tokens
            for position, trajectory in enumerate(group.played):
                field = f"{name}.trajectories[{position}]"
                check_segments(served, field, trajectory)
                with placed(field):
                    parts = trajectory_documents(
                        served.codec, trajectory, 0, prompt=prompt, options=self.chat_template_kwargs
                    )
                longest = max(part.document.length for part in parts)
                yield field, sum(part.document.num_trained for part in parts), longest

    def _check_length(self, served: ServedLimits, field: str, learnt: int, longest: int) -> None:
        """A member is within the limits: what is learnt of it, and its longest sequence; both in tokens."""
        if self.max_completion_length is not None and learnt > self.max_completion_length:
            raise InvalidRequest(
                f"max_completion_length is {self.max_completion_length}, and {field} has {learnt} "
                "tokens: give the max_tokens that the rollouts were sampled with",
                param="max_completion_length",
            )
        limit, context = served.max_train_tokens, served.max_model_len
        if limit and longest > limit:
            raise over_limit(field, longest, limit, "leave it out")
        if self.exact_forward and context and longest > context:
            raise InvalidRequest(
                f"{field} has {longest} tokens with its prompt, and exact_forward has the "
                f"engine decode it, whose context is {context}: leave it out, or leave exact_forward out",
                param=field,
            )

    @property
    def scored_groups(self) -> list[GrpoGroup]:
        """The groups, whichever way they were given; none for completion ids that are still to be resolved."""
        if self.completions is not None and self.rewards is not None:
            flags: Sequence[bool | None] = self.truncated or [None] * len(self.completions)
            temperature = 1.0 if self.temperature is None else self.temperature
            completions = [
                GrpoCompletion(text=text, reward=reward, truncated=flag, temperature=temperature)
                for text, reward, flag in zip(self.completions, self.rewards, flags, strict=True)
            ]
            return [GrpoGroup(prompt=self.prompt, completions=completions)]
        return self.groups or []

    @property
    def credit(self) -> Credit:
        """How rewards become what is compared."""
        return Credit(self.advantage, self.discount, self.least_reward_std)

    @property
    def sampled_by(self) -> dict[AdapterVersion, str]:
        """Adapter versions that rollouts name, each with the first field that names it.

        Raises:
            InvalidRequest: there are more than MOST_SAMPLERS.
        """
        found: dict[str, str] = {}
        for number, group in enumerate(self.groups or ()):
            for place, name in group.samplers:
                found.setdefault(name, f"groups[{number}].{place}")
        versions: dict[AdapterVersion, str] = {}
        for name, field in found.items():
            for version in versions_of(parse_policy(name)):
                versions.setdefault(version, field)
        if len(versions) > MOST_SAMPLERS:
            raise InvalidRequest(
                f"the rollouts were sampled by {len(versions)} adapter versions, over the limit of {MOST_SAMPLERS} a "
                "job: train on those of fewer versions, or leave `adapter` out",
                param="groups",
            )
        return versions

    @property
    def completion_ids(self) -> list[str]:
        """The completion ids to resolve. The gateway replaces them by groups of `prompt_token_ids` and completions of
        `token_ids`, `logprobs`, `temperature`, `truncated` and `adapter` before the job enters the queue."""
        listed = [scored.completion_id for scored in self.rollouts or ()]
        grouped = [rollout.completion_id for group in self.groups or () for rollout in group.completions]
        chained = [found for trajectory in self.stored for found in trajectory.ids]
        return listed + [found for found in grouped if found is not None] + chained

    @property
    def stored(self) -> list[StoredTrajectory]:
        """The trajectories that the gateway replaces by their segments, as it does completion ids."""
        members = [one for group in self.groups or () for one in group.trajectories or ()]
        return [one for one in members if isinstance(one, StoredTrajectory)]


def _clip(given: dict[str, Any], side: int) -> float:
    return LOSS_TYPES[given.get("loss_type", DEFAULT_LOSS_TYPE)].clip[side]
