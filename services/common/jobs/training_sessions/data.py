"""Data of a loss: sequences of tokens, and what the loss says about each of them."""

from __future__ import annotations

from abc import abstractmethod
from operator import not_
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import NULL, Rules, contains, either, given, has, if_any
from services.common.validation.strict_models import SentModel

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Factor = Annotated[float, Field(ge=-1e9, le=1e9)]
"""Weight or advantage of a token, bounded so that sums stay finite."""


class DatumBase(SentModel):
    """Data of a loss, in whichever form they are sent."""

    advantages: list[Factor] | None = None

    @abstractmethod
    def lacks(self, *, sampled: bool) -> str | None:
        """Field that a loss with a ratio to the policy that sampled misses, or that another does not take."""


class Datum(DatumBase):
    """One sequence and what the loss says about it. All lists have the length of ``token_ids``.

    Without ``targets``, entry i of a list belongs to token i: its weight, its advantage, its log-probability given the
    tokens before it. The first token has nothing before it, so its weight is 0. With ``targets``, entry i belongs to
    ``targets[i]``, the token after ``token_ids[i]``.
    """

    token_ids: list[TokenId] = Field(min_length=1)
    targets: list[TokenId] | None = None
    """None: the next token of ``token_ids``."""
    weights: list[Factor] | None = None
    """A token of weight 0 is not scored. None: 1 for every token that has one before it."""
    logprobs: list[Annotated[float, Field(ge=-1e9, le=1e-3)]] | None = None
    """Log-probabilities of the policy that sampled: ``sampling_logprobs`` of a response."""
    score_all: bool = Field(False, exclude_if=not_)
    """Score the tokens of weight 0, too: the loss and its gradient are the same."""

    json_rules: ClassVar[Rules] = (
        either(given("targets"), has(token_ids={"minItems": 2})),
        either(given("targets"), if_any(weights=either(NULL, {"prefixItems": [{"const": 0}]}))),
        either(has(score_all=True), if_any(weights=either(NULL, contains({"not": {"const": 0}})))),
    )

    @model_validator(mode="after")
    def _agree(self) -> Datum:
        count = len(self.token_ids)
        for name in ("targets", "weights", "advantages", "logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != count:
                raise contradiction(f"{name} has {len(values)} entries and token_ids {count}: one each", name)
        if self.targets is None:
            if count < 2:
                raise contradiction("one token alone predicts nothing: give more, or targets", "token_ids")
            if self.weights is not None and self.weights[0] != 0:
                raise contradiction(
                    "weights[0] must be 0: nothing comes before the first token (entry i of a list belongs to token "
                    "i; give targets where it should belong to the token after it)",
                    "weights",
                )
        if self.weights is not None and not self.score_all and not any(self.weights):
            raise contradiction("all weights are 0: nothing would be scored", "weights")
        return self

    def lacks(self, *, sampled: bool) -> str | None:
        fields = {"advantages": self.advantages, "logprobs": self.logprobs}
        return next((name for name, values in fields.items() if (values is not None) != sampled), None)

    @property
    def inputs(self) -> list[int]:
        """Tokens that the model reads."""
        return self.token_ids if self.targets is not None else self.token_ids[:-1]

    @property
    def predicted(self) -> list[int]:
        """The token after each input."""
        return self.targets if self.targets is not None else self.token_ids[1:]

    @property
    def effective_weights(self) -> list[float]:
        """Weight of each predicted token."""
        if self.weights is None:
            return [1.0] * len(self.inputs)
        return self._aligned(self.weights)

    @property
    def scored(self) -> list[bool]:
        """Whether each predicted token gets a log-probability."""
        return [self.score_all or weight != 0 for weight in self.effective_weights]

    def aligned(self, name: Literal["advantages", "logprobs"]) -> list[float]:
        """Value of each predicted token. Raises ValueError if the list was not given."""
        values = getattr(self, name)
        if values is None:
            raise ValueError(f"{name} was not given")
        return self._aligned(values)

    @property
    def unpredicted(self) -> int:
        """Entries at the head of each list that belong to no predicted token."""
        return 0 if self.targets is not None else 1

    def _aligned(self, values: list[float]) -> list[float]:
        return values[self.unpredicted :]
