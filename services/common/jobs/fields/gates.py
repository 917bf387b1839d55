"""Gates: suites on which a job's result is compared, item by item, with what it is to replace.

docs/decisions/gates.md says which tests decide, and how the levels of several suites go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from services.common.jobs.fields.refs import Policy, SuiteRef
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import SOME, Rule, Rules, either, given, has, never, where
from services.common.validation.strict_models import SentModel, absent

Need: TypeAlias = Literal["all", "any"]
PARENT = "parent"
"""What the job starts from: a version of an adapter, or the base. An adapter of this name is "parent@n"."""
MAX_CONDITIONS = 8
MAX_SUITES = 16
ALPHA = 0.05


def _at(default: object) -> Callable[[object], bool]:
    """True for the default: earlier releases did not have the field, and read jobs without it."""
    return lambda value: value == default


class GainOn(SentModel):
    """A suite on which the result must be better."""

    suite: SuiteRef
    min_gain: float = Field(0.0, ge=0, le=1e9)
    """Gain of the mean score that must be exceeded; 0.02 is two points of accuracy. 0: better at all."""


class NoLossOn(SentModel):
    """A suite on which the result must not be much worse."""

    suite: SuiteRef
    max_loss: float = Field(gt=0, le=1e9)
    """Loss of the mean score that must be ruled out; 0.03 is three points of accuracy."""


class SuiteGate(SentModel):
    """Conditions on suites, each decided by a test on the same items: all must hold, with a chance of at most `alpha`
    that they do where they should not."""

    gain: list[GainOn] = Field(default_factory=list, max_length=MAX_CONDITIONS, exclude_if=_at([]))
    """Suites on which the result must be better."""
    no_loss: list[NoLossOn] = Field(default_factory=list, max_length=MAX_CONDITIONS, exclude_if=_at([]))
    """Suites on which it must not be much worse."""
    need: Need = Field("all", exclude_if=_at("all"))
    """Whether it must be better on all suites of `gain`, or on any of them. No loss is asked for on all either way."""
    alpha: float = Field(ALPHA, ge=1e-4, le=0.2, exclude_if=_at(ALPHA))
    """Probability that a result passes that should not."""
    against: Policy = Field(PARENT, exclude_if=_at(PARENT))
    """What the result is compared with: "parent" (what the job starts from, the base if it begins a new adapter),
    "base", a version, "name@n", or several adapters together, "a@3*0.7+b"."""
    allow_contaminated: bool = Field(False, exclude_if=_at(False))
    """Decide also on suites of which something was trained on, or of whose training nothing is known."""

    max_kl: float | None = Field(None, gt=0, le=1e3, exclude_if=absent)
    """Divergence from what the result is compared with that must not be exceeded: KL for each token in nats, on answers
    to the prompts of these suites."""

    json_rules: ClassVar[Rules] = (where(has(need="any"), has(gain={"type": "array", "minItems": 2})),)

    @property
    def asks(self) -> bool:
        """Whether there is a condition on a suite."""
        return bool(self.gain or self.no_loss)

    @model_validator(mode="after")
    def _consistent(self) -> SuiteGate:
        if self.need == "any" and len(self.gain) < 2:
            raise contradiction('need "any" chooses among several suites of gain: give two or more', "need")
        gain, no_loss = [one.suite for one in self.gain], [one.suite for one in self.no_loss]
        check_once(gain, "gain")
        check_once(no_loss, "no_loss")
        both = set(gain).intersection(no_loss)
        if both and self.need == "all":
            raise contradiction(f"{min(both)} must show a gain: leave it out of no_loss", "no_loss")
        return self


def check_once(names: Sequence[str], field: str) -> None:
    """Raises PydanticCustomError if a suite is named twice."""
    for name in names:
        if names.count(name) > 1:
            raise contradiction(f"{name} is in {field} more than once: leave it out", field)


ON_SUITES: Rule = either(has(gain=SOME), has(no_loss=SOME))
"""Holds of a gate that has a condition on a suite."""
SETTINGS_GIVEN: Rule = either(
    has(alpha=never({"const": ALPHA})),
    has(against=never({"const": PARENT})),
    has(allow_contaminated=True),
    given("max_kl"),
)
"""Holds of a gate that says how suites decide."""


class AttachIf(SuiteGate):
    """Conditions on suites for attaching the result; without them it is published all the same."""

    json_rules: ClassVar[Rules] = (ON_SUITES,)

    @model_validator(mode="after")
    def _has_conditions(self) -> AttachIf:
        if not self.asks:
            raise contradiction("nothing is asked for: name suites in gain or no_loss", "gain")
        return self
