"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290): its request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from services.common.jobs.examples import EVALUATES, ExampleJob
from services.common.jobs.fields.acceptance import Better, publish_if_rule
from services.common.jobs.fields.prompts import AskedExample
from services.common.validation.json_rules import Rules


class DpoExample(AskedExample):
    """Two completions of one prompt, of which `chosen` is the better."""

    chosen: str
    rejected: str

    @model_validator(mode="after")
    def _differ(self) -> DpoExample:
        if self.chosen == self.rejected:
            raise ValueError("chosen and rejected are the same text: the pair prefers nothing, leave it out")
        return self


class DpoJob(ExampleJob[DpoExample]):
    """Direct preference optimisation."""

    evaluated: ClassVar[Mapping[str, Better]] = {
        "eval_loss": "lower",
        "eval_accuracy": "higher",
        "eval_margin": "higher",
    }
    json_rules: ClassVar[Rules] = (publish_if_rule(evaluated, EVALUATES),)

    kind: Literal["dpo"] = "dpo"
    overlong: Literal["error", "drop"] = "error"
    """What happens to a pair one of whose completions is over the token limit with its prompt."""
    reference: Literal["base", "start"] = "base"
    """What the policy is compared with: the model without adapter, or the policy the job starts from."""
    beta: float = Field(0.1, gt=0, le=100)
    """How strongly the policy is held to the reference: the lower, the farther it may go."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a label is wrong (conservative DPO)."""
