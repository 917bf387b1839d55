"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290): the request, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs.base import Pace, ServedLimits
from services.common.jobs.documents import answer_documents
from services.common.jobs.examples import EVALUATES, ExampleJob
from services.common.jobs.fields.acceptance import Better, publish_if_rule
from services.common.jobs.fields.prompts import AskedExample
from services.common.jobs.token_checks import check_conversation, check_examples
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
    pace: ClassVar[Pace] = Pace(2e-5, least_steps=20)
    least_loss_fall: ClassVar[float] = 0.03
    request_examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "pairs": {
            "adapter": "sums",
            "attach": False,
            "examples": [{"prompt": "What is 12 plus 7?", "chosen": "19", "rejected": "20"}],
        }
    }
    json_rules: ClassVar[Rules] = (publish_if_rule(evaluated, EVALUATES),)

    kind: Literal["dpo"] = "dpo"
    overlong: Literal["error", "drop"] = "error"
    """Handling of a pair one of whose completions is over the token limit with its prompt."""
    reference: Literal["base", "start"] = "base"
    """Reference of the policy: the model without adapter, or the policy the job starts from."""
    beta: float = Field(0.1, gt=0, le=100)
    """Strength with which the policy is held to the reference: the lower, the farther it may go."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a label is wrong (conservative DPO)."""

    def check_tokens(self, served: ServedLimits) -> None:
        """See JobBase. Both completions of a pair are within the limit, and differ."""
        for name, example in self.numbered_examples():
            messages = "messages" if example.prompt is None else "prompt"
            check_conversation(name, example.asked, example.tools, messages=messages)

        def tokens(example: DpoExample) -> int:
            pair = answer_documents(served.codec, self, example, (example.chosen, example.rejected), 0)
            if pair[0].token_ids == pair[1].token_ids:
                raise InvalidRequest("chosen and rejected are the same tokens: the pair prefers nothing, leave it out")
            return max(document.length for document in pair)

        check_examples(served, self, tokens, overlong=self.overlong, advice="shorten it, or choose overlong 'drop'")
