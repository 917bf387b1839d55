"""Every scorer, and the weighted sum of several. A new scorer is a module of its own and a line here: in ``_Any`` if it
reads a completion's text, which rewards of training jobs and suites share, else in ``Reward`` or ``SuiteScorer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias, get_args

from pydantic import Field

from services.common.errors import InvalidRequest
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.json_schema import ItemSchemaSpec, JsonSchemaReward
from services.common.jobs.scorers.judge import JudgeSpec
from services.common.jobs.scorers.of_rewards.penalties import FormatPenalty, LengthPenalty
from services.common.jobs.scorers.of_rewards.tournament import TournamentReward
from services.common.jobs.scorers.of_suites.instructions import InstructionsSpec
from services.common.jobs.scorers.of_suites.likelihood import ChoiceSpec, PerplexitySpec
from services.common.jobs.scorers.of_suites.tool_calls import ToolCallsSpec
from services.common.jobs.scorers.of_texts.exact import ContainsReward, ExactReward
from services.common.jobs.scorers.of_texts.numeric import NumericReward
from services.common.jobs.scorers.of_texts.regex import RegexReward
from services.common.jobs.scorers.python_tests import PythonTestsReward
from services.common.jobs.scorers.sample import Sample
from services.common.jobs.scorers.webhook import WebhookReward
from services.common.validation.json_rules import Rule, either, has

_Any: TypeAlias = (
    RegexReward
    | ExactReward
    | ContainsReward
    | NumericReward
    | JsonSchemaReward
    | PythonTestsReward
    | WebhookReward
    | JudgeSpec
)
Reward: TypeAlias = _Any | TournamentReward | LengthPenalty | FormatPenalty
RewardSpec = Annotated[Reward, Field(discriminator="type")]
"""Settings of a scorer in a request; `type` says which."""
SuiteScorer: TypeAlias = _Any | ItemSchemaSpec | ToolCallsSpec | InstructionsSpec | ChoiceSpec | PerplexitySpec
SuiteScorerSpec = Annotated[SuiteScorer, Field(discriminator="type")]
"""Settings of the scorer of a suite; `type` says which."""
SCORERS: tuple[type[ScorerSpec], ...] = get_args(_Any)
REWARDS: tuple[type[ScorerSpec], ...] = get_args(Reward)

_LARGEST = 1e9
"""Largest reward, as of one that comes with a rollout (services/common/jobs/kinds/rollouts.py)."""


def needs_answer(scorers: Sequence[type[ScorerSpec]] = SCORERS) -> Rule:
    """JSON Schema of the settings of a scorer that needs an answer."""
    always = [spec.model_fields["type"].default for spec in scorers if spec.always_compares]
    return either(has(type={"enum": always}), *(spec.compares for spec in scorers if spec.compares is not None))


class Rewards:
    """The weighted sum of a job's rewards.

    Raises:
        InvalidRequest: a pattern, schema or URL cannot be used; names it.
    """

    def __init__(self, specs: Sequence[ScorerSpec], grants: Grants) -> None:
        self._weights = [spec.weight for spec in specs]
        self._scorers = [spec.scorer(f"generate.reward[{index}]", grants) for index, spec in enumerate(specs)]

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None] = lambda: None) -> list[float]:
        """One reward a sample.

        Args:
            interrupt: called now and then; may raise.

        Raises:
            Unavailable: a webhook failed, also when asked again.
        """
        totals = [0.0] * len(samples)
        for weight, scorer in zip(self._weights, self._scorers, strict=True):
            scores = scorer.score(samples, interrupt)
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        worst = max(map(abs, totals), default=0.0)
        if not math.isfinite(worst) or worst > _LARGEST:
            raise InvalidRequest(
                f"a reward of {worst:g} is over {_LARGEST:g}: lower the weights", param="generate.reward"
            )
        return totals
