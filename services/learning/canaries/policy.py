"""Policy of a canary: how much traffic the candidate gets, what counts as better, and what ends it at once."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, model_validator

from services.common.evaluation.statistics.power import ALPHA, POWER
from services.common.evaluation.statistics.sequential import SequentialTest
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import SOME, Rules, if_any
from services.common.validation.strict_models import SentModel
from services.learning.canaries.refusals import OPENINGS
from services.learning.feedback.record import Source

SPREAD = 2.0
"""Distance between the worst score and the best."""
_DAY = 86400.0


Opening = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S")]


class Rise(SentModel):
    """Limit of a share of the answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    rise: float = Field(gt=0, le=1)
    """How much greater the candidate's share may be."""
    min_answers: int = Field(20, ge=1, le=1_000_000)
    """Answers of the candidate before it counts."""


class Ratio(SentModel):
    """Limit of an amount per answer."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    ratio: float = Field(gt=1, le=100)
    """How many times as much the candidate may need."""
    min_answers: int = Field(20, ge=1, le=1_000_000)
    """Answers of the candidate before it counts."""


class Guardrails(SentModel):
    """Limits that roll a candidate back at once. null: not watched.

    One counts as crossed when the lower end of an interval that holds at every look lies above it, so chance alone
    hardly ever crosses one.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    errors: Rise | None = Rise(rise=0.05)
    """Answers that failed on the server's side."""
    cut_off: Rise | None = Rise(rise=0.2)
    """Answers that the token limit cut off."""
    repetition: Rise | None = Rise(rise=0.1)
    """Answers that say the same again and again."""
    broken_calls: Rise | None = Rise(rise=0.1)
    """Answers with a call of a tool whose arguments are no JSON object."""
    refusals: Rise | None = Rise(rise=0.1)
    """Answers that refuse: they begin with one of the policy's `refusals`."""
    length: Ratio | None = Ratio(ratio=2)
    """Tokens of an answer; as many times fewer count as well."""
    latency: Ratio | None = Ratio(ratio=2)
    """Seconds from the request to the end of its answer."""


class CanaryPolicy(SentModel):
    """Rules of a canary, which stay as they are once it has begun."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    json_rules: ClassVar[Rules] = (if_any(sources=SOME),)

    share: float = Field(0.1, gt=0, le=0.5)
    """Share of the traffic that the candidate answers."""
    gain: float = Field(0.1, gt=0, le=SPREAD)
    """Smallest improvement of the mean score, which lies between -1 and 1, that is worth a promotion."""
    alpha: float = Field(ALPHA, gt=0, lt=0.5)
    """Probability that a candidate which is no better is promoted, at most."""
    power: float = Field(POWER, ge=0.5, lt=1)
    """Probability that one which is better by `gain` is promoted."""
    min_seconds: float = Field(0, ge=0, le=30 * _DAY)
    """Time before which nothing is promoted."""
    max_seconds: float = Field(7 * _DAY, gt=0, le=90 * _DAY)
    """Time after which a candidate that has not shown to be better is rolled back."""
    sources: list[Source] = Field(["user"], min_length=1, max_length=3)
    """Whose feedback counts. Its score does, else its thumb (1 or -1), else its preference."""
    refusals: list[Opening] = Field(list(OPENINGS), max_length=100)
    """Openings by which an answer is known to refuse, whatever their case, spaces and apostrophes."""
    guardrails: Guardrails = Guardrails()

    @model_validator(mode="after")
    def _ends_after_it_may(self) -> CanaryPolicy:
        if self.max_seconds <= self.min_seconds:
            raise contradiction(
                "it would end before it may promote anything: max_seconds must be over min_seconds", "max_seconds"
            )
        return self

    @property
    def test(self) -> SequentialTest:
        """The test that decides."""
        return SequentialTest(self.gain, self.alpha, self.power, SPREAD)
