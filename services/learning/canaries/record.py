"""Canary as data: what is tried on whom, what is known of it, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from services.common.adapters.names import BASE
from services.common.evaluation.statistics.sequential import Look, Verdict
from services.common.storage.ids import PATTERN, ulid
from services.common.validation.strict_models import StrictModel
from services.learning.canaries.policy import CanaryPolicy
from services.learning.feedback.record import Source

ID_PATTERN: Final = f"^canary_{PATTERN}$"
Arm: TypeAlias = Literal["current", "candidate"]
ARMS: Final[tuple[Arm, Arm]] = ("current", "candidate")
State: TypeAlias = Literal["running", "promoting", "promoted", "rolled_back", "superseded"]
"""promoting: the decision is kept with its evidence, and the pointers are being moved."""
ENDED: Final[tuple[State, ...]] = ("promoted", "rolled_back", "superseded")
Outcome: TypeAlias = Literal["promote", "roll_back", "supersede"]
Reason: TypeAlias = Literal["better", "not_better", "guardrail", "time", "person", "moved", "gone"]
"""moved: somebody else moved the adapter's pointer or attachment. gone: a version was removed."""
CONTROLLER: Final = "controller"
"""Who decided where no person did."""


def new_canary_id() -> str:
    """Id of a canary that begins now."""
    return f"canary_{ulid()}"


class NewCanary(StrictModel):
    """A canary that is about to begin."""

    id: str
    """By which beginning it again is the same."""
    adapter: str
    current: str
    """Version that it is compared with: "name@n", or "base" for an adapter without one."""
    candidate: str
    """Version that is tried: "name@n"."""
    attached: bool
    """True if the base model's name is answered with ``current``, so that its requests take part."""
    policy: CanaryPolicy
    owner: str = ""
    """Id of the API key that began it; empty: there are no keys."""
    origin: str = ""
    """Learner that began it; empty: a person did."""


class SourceEvidence(StrictModel):
    """What one source said of an arm that does not decide: a judge, say."""

    opinions: int
    score: float | None
    """Mean of the scores; null: there is none."""


class ArmEvidence(StrictModel):
    """One arm so far."""

    version: str
    answers: int = 0
    errors: int = 0
    cut_off: int = 0
    repetition: int = 0
    calls: int = 0
    """Answers with calls of tools."""
    broken_calls: int = 0
    refusals: int = 0
    """Answers that begin with one of the policy's `refusals`."""
    tokens: int = 0
    seconds: float = 0.0
    """Sum over the answers, from request to end."""
    first_seconds: float = 0.0
    """Sum over the answers, from request to first token."""
    opinions: int = 0
    """Feedback that counts."""
    voices: int = 0
    """Independent scores: one a user, whatever it says; else one an answer or session."""
    score: float | None = None
    """Mean over the voices."""
    labels: Mapping[str, int] = {}
    """How often feedback had which label; the most frequent ones."""
    others: Mapping[Source, SourceEvidence] = {}
    """Feedback of sources that the policy does not name. It is shown, and decides nothing."""


class GuardrailEvidence(StrictModel):
    """One guardrail so far."""

    name: str
    allowed: float
    """The rise, or the natural logarithm of the ratio."""
    effect: float
    """Candidate minus current one, in the same unit."""
    low: float
    """Lower end of its interval, which is above ``allowed`` when it is crossed."""
    crossed: bool


class LookEvidence(StrictModel):
    """A look of the sequential test (services/common/evaluation/statistics/sequential.py)."""

    verdict: Verdict
    effect: float
    low: float
    high: float
    evidence: float
    progress: float
    observed: tuple[int, int]

    @classmethod
    def of(cls, look: Look) -> LookEvidence:
        return cls(
            verdict=look.verdict,
            effect=look.effect,
            low=look.low,
            high=look.high,
            evidence=look.evidence,
            progress=look.progress,
            observed=look.observed,
        )


class CanaryEvidence(StrictModel):
    """All that is known at one moment."""

    at: float
    """Unix seconds."""
    look: LookEvidence
    current: ArmEvidence
    candidate: ArmEvidence
    guardrails: tuple[GuardrailEvidence, ...] = ()


class Decision(StrictModel):
    """How a canary ends, and why."""

    outcome: Outcome
    reason: Reason
    detail: str
    """The reason in a sentence."""
    by: str = CONTROLLER
    """Id of the API key of the person who decided, or "controller"."""


class CanaryRecord(NewCanary):
    """A canary as it is kept. Times are unix seconds."""

    key: str
    """Secret of its ids and shares, in hex."""
    state: State
    began_at: float
    ended_at: float | None = None
    evidence: CanaryEvidence | None = None
    """The last look; once it is decided, what the decision rests on."""
    decision: Decision | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def version_of(self, arm: Arm) -> str:
        """ "name@n", or "base"."""
        return self.candidate if arm == "candidate" else self.current

    @property
    def of_base(self) -> bool:
        """True if it is compared with the model without adapter."""
        return self.current == BASE
