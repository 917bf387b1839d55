"""Evidence of a gate, which goes into the manifest of the version that it decided on."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

ConditionKind: TypeAlias = Literal["gain", "no_loss"]


class _Evidence(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class ContaminationEvidence(_Evidence):
    """Overlap of a gate's suite with all that the version was trained on, which the job let pass."""

    suite: str
    items: int
    contaminated: int
    """Items of which something was trained on."""
    exact: int
    """Those whose whole prompt was."""
    unknown: tuple[str, ...]
    """Versions and jobs of the lineage of whose training nothing is known."""


class ConditionEvidence(_Evidence):
    """Test of one condition on one suite."""

    kind: ConditionKind
    suite: str
    """"name@n"."""
    digest: str
    """Of the suite."""
    at_least: float
    """Gain that had to be exceeded; of a loss that had to be ruled out, its negative."""
    items: int
    clusters: int
    """Groups, and items without one."""
    before: float
    """Mean score of what the version is compared with."""
    after: float
    """Mean score of the version."""
    invalid: tuple[int, int]
    """Answers of either that could not be read or judged; they count, with a score of 0."""
    gain: float
    """Mean amount by which the version is better, whichever direction is better."""
    interval: tuple[float, float]
    """95 % interval of the gain."""
    p: float
    """Probability of such a result, were the gain no larger than `at_least`."""
    test: Literal["mcnemar", "sign-flip", "bounded-mean"]
    alpha: float
    """Level that this test was held to."""
    better: int
    """Items on which the version is better."""
    worse: int
    sees: float | None
    """Smallest true difference that such a comparison finds with a power of 0.8."""
    passed: bool


class DivergenceEvidence(_Evidence):
    """Divergence of a version from what it is compared with, as an estimate of KL(before || after) for each token, in
    nats."""

    kl: float
    """Mean of log p_before - log p_after over the tokens that the one before sampled."""
    interval: tuple[float, float]
    """95 % interval, over the prompts."""
    max_kl: float
    """Bound that the upper end had to keep."""
    prompts: int
    tokens: int
    passed: bool

    @property
    def summary(self) -> str:
        """What was measured, in words."""
        verdict = "shown" if self.passed else "not shown"
        return (
            f"KL {self.kl:.3g} a token ({self.interval[0]:.3g} to {self.interval[1]:.3g}) on {self.tokens} tokens of "
            f"{self.prompts} answers, at most {self.max_kl:g} {verdict}"
        )


class GateEvidence(_Evidence):
    """Decision of a gate with all that it rests on."""

    gate: str
    """"publish_if" or "attach_if"."""
    passed: bool
    evaluation: str
    """Id of the evaluation, /v1/evaluations/{id}, which has every answer."""
    candidate: str
    """Digest of the weights that were tried."""
    against: str
    """"base", "name@n" or "a@3*0.7+b@1"."""
    need: Literal["all", "any"]
    alpha: float
    seed: int
    conditions: tuple[ConditionEvidence, ...]
    contamination: tuple[ContaminationEvidence, ...] = ()
    divergence: DivergenceEvidence | None = None
    """null: the gate has no `max_kl`."""

    @property
    def summary(self) -> str:
        """The decision in one sentence."""
        parts = [_said(one) for one in self.conditions]
        said = "; ".join(parts if self.divergence is None else [*parts, self.divergence.summary])
        return f"{self.gate} is {'met' if self.passed else 'not met'} against {self.against}: {said}"


def _said(one: ConditionEvidence) -> str:
    wanted = f"more than {one.at_least:+g}" if one.at_least else "a gain"
    verdict = "shown" if one.passed else "not shown"
    sees = "" if one.passed or one.sees is None else f", it sees differences above {one.sees:.2g}"
    return (
        f"{one.suite} {one.before:.4g} → {one.after:.4g}, gain {one.gain:+.4g} ({one.interval[0]:+.3g} to "
        f"{one.interval[1]:+.3g}), {one.better} items better and {one.worse} worse, {wanted} {verdict} (p {one.p:.2g}, "
        f"alpha {one.alpha:g}{sees})"
    )
