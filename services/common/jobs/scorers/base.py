"""Base of the scorers' settings, which are part of a request: what they refuse, and the scorer that is made of them.

One module a scorer; `registry` lists them. A scorer gives one number a completion: a reward of a training job, or a
score in a suite. Those that read what only items of suites have (choices, tool calls, instructions) are of suites only.

Clients and the CLI read these settings with neither a pattern engine nor an HTTP client installed, so the modules
import those where they are used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable
from typing import ClassVar, Literal

from pydantic import Field

from services.common.jobs.scorers.grants import Granted, Grants
from services.common.jobs.scorers.sample import Reference, Scorer
from services.common.validation.json_rules import Rule, Rules
from services.common.validation.strict_models import SentModel


class ScorerSettings(SentModel):
    """Settings of one scorer."""

    json_rules: ClassVar[Rules] = ({"required": ["type"]},)
    """Rules of a request: it says which scorer it is."""
    always_compares: ClassVar[bool] = False
    """Whether this scorer needs an answer whatever its settings are."""
    compares: ClassVar[Rule | None] = None
    """JSON Schema of the settings with which the scorer needs an answer, where that depends on them."""
    better: ClassVar[Literal["higher", "lower"]] = "higher"
    """Direction of a better score."""

    @property
    def name(self) -> str:
        """Name of the scorer, which is its `type`."""
        return str(type(self).model_fields["type"].default)

    @property
    def needs_answer(self) -> bool:
        """Whether every prompt must have an answer."""
        return self.always_compares

    def wrong_answer(self, answer: str) -> str | None:
        """Reason why the scorer cannot compare with this answer, as the end of a sentence; None: it can."""
        del answer
        return None

    def wrong_item(self, reference: Reference) -> str | None:
        """Reason why the scorer cannot score a suite's item, which begins with the field at fault; None: it can."""
        if self.needs_answer and not reference.expected:
            return f"expected: is missing, and the {self.name} scorer compares with it"
        for answer in reference.expected:
            if reason := self.wrong_answer(answer):
                return f"expected: is {answer[:80]!r}: {reason}"
        return None

    def check(self, where: str, answers: Iterable[tuple[str, str | None]]) -> None:
        """Compiles whatever the scorer will run.

        Args:
            where: place of the scorer in the job.
            answers: field and text of each answer that it will compare with.

        Raises:
            InvalidRequest: something cannot be used; it is named.
        """
        del where, answers

    def check_allowed(self, where: str, granted: Granted) -> None:
        """Checks the settings against what an engine allows.

        Args:
            where: place of the scorer in the job.

        Raises:
            InvalidRequest: the engine may not run this scorer.
        """
        del where, granted


class SampleScorerSpec(ScorerSettings):
    """Settings of a scorer of samples, which are completions."""

    @abstractmethod
    def scorer(self, where: str, grants: Grants) -> Scorer:
        """The scorer with these settings.

        Args:
            where: place of the scorer in the job, for messages.
            grants: what the engine lets scorers use.

        Raises:
            InvalidRequest: the settings cannot be used.
        """

    def vote(self, text: str) -> Hashable | None:
        """Vote of a completion among several, in a form in which equal answers are equal; None: it has none."""
        return text or None


class ScorerSpec(SampleScorerSpec):
    """Settings of a scorer that reads a completion's text: a reward of a training job, or the scorer of a suite."""

    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """The completion's reward is the sum of weight times score."""
