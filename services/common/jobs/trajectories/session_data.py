"""Trajectories as data of training sessions: the gateway writes them as sequences with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs.documents import placed
from services.common.jobs.training_sessions.calls import Loss, LossCall
from services.common.jobs.training_sessions.data import Datum, DatumBase, Factor
from services.common.jobs.trajectories.documents import trajectory_documents
from services.common.jobs.trajectories.segments import Trajectory
from services.common.jobs.trajectories.stored import STORED, AnyTrajectory, StoredTrajectory
from services.common.validation.json_rules import Rules, at_least_one, both, either, given, has, if_any, left_out
from services.common.validation.strict_models import absent

if TYPE_CHECKING:
    from services.common.text.tokenizer import TextCodec

_STORED = at_least_one(*STORED)
_ONE_SEQUENCE = {"type": "array", "prefixItems": [has(type="observation")], "items": if_any(restarts=False)}
_RECORDED = has(segments={"items": either(has(type="observation"), given("logprobs"))})


class TrajectoryDatum(DatumBase):
    """A trajectory, and what the loss says of its actions and observations."""

    trajectory: AnyTrajectory
    """It begins with an observation, and is one sequence. Its rewards are not read: ``advantages`` say what they are
    worth."""
    advantages: list[Factor] | None = Field(None, min_length=1, exclude_if=absent)
    """Of each action, or one for all of them."""
    action_weight: Factor = 1.0
    """Weight of each token of an action."""
    observation_weight: Factor = 0.0
    """Weight of each token that was observed behind the first action."""

    json_rules: ClassVar[Rules] = (
        has(trajectory=either(both(_STORED, if_any(split=False)), has(segments=_ONE_SEQUENCE))),
        either(
            left_out("advantages"),
            both(has(trajectory=either(_STORED, _RECORDED)), if_any(observation_weight={"const": 0})),
        ),
        either(if_any(action_weight={"not": {"const": 0}}), has(observation_weight={"not": {"const": 0}})),
    )

    @model_validator(mode="after")
    def _one_sequence(self) -> TrajectoryDatum:
        trajectory = self.trajectory
        if isinstance(trajectory, StoredTrajectory):
            if trajectory.split:
                raise ValueError("trajectory.split: a datum is one sequence; give the others as data of their own")
        elif not trajectory.begins_by_itself:
            raise ValueError("trajectory begins with an action: begin with an observation, which is its prompt")
        elif trajectory.restarts:
            raise ValueError("trajectory restarts: a datum is one sequence; give the others as data of their own")
        if not self.action_weight and not self.observation_weight:
            raise ValueError("action_weight and observation_weight are 0: nothing would be scored")
        if self.advantages is None:
            return self
        if self.observation_weight:
            raise ValueError(
                "observation_weight is of the loss cross_entropy, which takes no advantages: send a second call with "
                "action_weight 0, whose gradient is added"
            )
        if isinstance(trajectory, Trajectory) and trajectory.actions[0].logprobs is None:
            raise ValueError("trajectory has no logprobs, and advantages need them: give those of every action")
        return self

    def lacks(self, *, sampled: bool) -> str | None:
        return "advantages" if (self.advantages is not None) != sampled else None

    def sequence(
        self, codec: TextCodec, trajectory: Trajectory, *, sampled: bool, temperature: float, field: str
    ) -> Datum:
        """The datum by its tokens: weights, advantages and log-probabilities stand at the actions' tokens.

        Args:
            trajectory: by its segments.
            sampled: the loss has a ratio to the policy that sampled.
            temperature: of the call.
            field: of the call, for messages.

        Raises:
            InvalidRequest: the advantages are not as many as the actions, an action was sampled at another temperature
                than its ratio is of, or see trajectory_documents.
        """
        with placed(f"{field}.trajectory"):
            (found,) = trajectory_documents(codec, trajectory, 0)
        tokens = list(found.document.token_ids)
        weights = [0.0] * len(tokens)
        if found.document.observed is not None:
            weights = [self.observation_weight if seen else 0.0 for seen in found.document.observed]
        if not self.action_weight and not any(weights):
            raise InvalidRequest(f"{field}: nothing was observed behind the first action", param=field)
        advantages, logprobs = [0.0] * len(tokens), [0.0] * len(tokens)
        given = self._of_actions(len(found.turns), field)
        for turn, advantage in zip(found.turns, given, strict=True):
            place = slice(turn.begin, turn.end)
            count = turn.end - turn.begin
            weights[place] = [self.action_weight] * count
            if not sampled:
                continue
            # What was sampled greedily has the log-probabilities of the plain distribution.
            if (turn.action.temperature or 1.0) != temperature:
                raise InvalidRequest(
                    f"{field}: action {turn.number} was sampled at temperature {turn.action.temperature:g}, and the "
                    f"call's is {temperature:g}: data of one call have one temperature, that of the call",
                    param="temperature",
                )
            advantages[place] = [advantage] * count
            logprobs[place] = turn.action.logprobs or ()
        return Datum(
            token_ids=tokens,
            weights=weights,
            advantages=advantages if sampled else None,
            logprobs=logprobs if sampled else None,
        )

    def _of_actions(self, count: int, field: str) -> list[float]:
        given = self.advantages or [0.0]
        if len(given) not in (1, count):
            raise InvalidRequest(
                f"{field}.advantages has {len(given)} entries and the trajectory {count} actions: give one each, or "
                "one for all",
                param=f"{field}.advantages",
            )
        return given * count if len(given) == 1 else given


def _form(value: Any) -> str:
    if isinstance(value, Mapping):
        return "trajectory" if "trajectory" in value else "tokens"
    return "trajectory" if isinstance(value, TrajectoryDatum) else "tokens"


AnyDatum: TypeAlias = Annotated[
    Annotated[Datum, Tag("tokens")] | Annotated[TrajectoryDatum, Tag("trajectory")], Discriminator(_form)
]


class ForwardBackwardBody(LossCall[AnyDatum]):
    """Body of forward_backward: a loss over sequences and trajectories."""


class ForwardBody(LossCall[AnyDatum]):
    """Body of forward, the same without gradient."""

    loss: Loss = "cross_entropy"
