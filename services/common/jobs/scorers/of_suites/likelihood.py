"""Scorers by log-likelihood: multiple choice and perplexity.

A runner asks an engine for the log-likelihoods of `continuations` behind the item's prompt, and makes a score of them
with `verdict`. Log-likelihoods are of the continuation's own tokens, each given all before it: there is no padding to
count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from services.common.jobs.scorers.base import ScorerSettings
from services.common.jobs.scorers.sample import Reference
from services.common.validation.json_rules import Rules, has, only_with

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-likelihood of a continuation: the sum over its tokens, in nats.

    Raises:
        ValueError: it is not a number at most 0, or there are no tokens.
    """

    logprob: float
    tokens: int
    bytes: int
    """Of the continuation in UTF-8."""

    def __post_init__(self) -> None:
        if not self.logprob <= 0:
            raise ValueError(f"a log-likelihood of {self.logprob}")
        if self.tokens < 1 or self.bytes < 1:
            raise ValueError(f"a continuation of {self.tokens} tokens and {self.bytes} bytes")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Score of an item, and how much the item counts beside its own weight."""

    score: float
    weight: float = 1.0


class LikelihoodSpec(Protocol):
    """Settings of a scorer by log-likelihood, as a runner uses them."""

    def shown(self, prompt: str, reference: Reference) -> str:
        """The last turn of the item's prompt as it is asked."""
        ...

    def continuations(self, reference: Reference) -> list[str]:
        """Texts whose log-likelihoods are needed behind the prompt."""
        ...

    def verdict(self, reference: Reference, found: Sequence[Likelihood]) -> Verdict:
        """Verdict on the log-likelihoods of ``continuations``, in their order."""
        ...


class ChoiceSpec(ScorerSettings):
    """1 if the right one of the item's `choices` is the most likely, else 0; where several are as likely, the share of
    the right ones among them. Nothing is sampled. Of suites only."""

    type: Literal["choice"] = "choice"
    by: Literal["letter", "text"] = "letter"
    """letter: the choices are listed under the prompt, and the letters are compared; text: the choices themselves."""
    length: Literal["byte", "token", "none"] | None = None
    """By text: log-likelihoods are divided by the length of the choice, for otherwise short ones win. None: "byte"."""
    prefix: str = Field("", max_length=100)
    """Text in front of each letter or choice, e.g. a space behind a raw prompt."""

    json_rules: ClassVar[Rules] = (only_with("length", has(by="text")),)

    @model_validator(mode="after")
    def _consistent(self) -> ChoiceSpec:
        if self.length is not None and self.by == "letter":
            raise ValueError('length would do nothing here: letters are equally long, only by "text" reads it')
        return self

    def wrong_item(self, reference: Reference) -> str | None:
        """See ScorerSettings."""
        if len(reference.choices) < 2:
            return "choices: the choice scorer needs two or more"
        if self.by == "letter" and len(reference.choices) > len(LETTERS):
            return f"choices: there are {len(reference.choices)}, and {len(LETTERS)} letters"
        if len(set(reference.choices)) < 2:
            return "choices: all of them are the same"
        if not reference.expected:
            return "expected: is missing, and the choice scorer compares with it"
        for answer in reference.expected:
            if not _places(answer, reference.choices):
                return f"expected: is {answer[:80]!r}, which is none of the choices and no letter of one"
        return None

    def shown(self, prompt: str, reference: Reference) -> str:
        """See LikelihoodSpec."""
        if self.by == "text":
            return prompt
        listed = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, reference.choices, strict=False))
        return "\n".join([prompt, *listed])

    def continuations(self, reference: Reference) -> list[str]:
        """See LikelihoodSpec."""
        texts = reference.choices if self.by == "text" else LETTERS[: len(reference.choices)]
        return [self.prefix + text for text in texts]

    def verdict(self, reference: Reference, found: Sequence[Likelihood]) -> Verdict:
        """See LikelihoodSpec."""
        if len(found) != len(reference.choices):
            raise ValueError(f"{len(found)} log-likelihoods of {len(reference.choices)} choices")
        rates = [self._rate(likelihood) for likelihood in found]
        best = {place for place, rate in enumerate(rates) if rate == max(rates)}
        right = {place for answer in reference.expected for place in _places(answer, reference.choices)}
        return Verdict(len(best & right) / len(best))

    def _rate(self, likelihood: Likelihood) -> float:
        length = self.length or ("byte" if self.by == "text" else "none")
        return likelihood.logprob / {"byte": likelihood.bytes, "token": likelihood.tokens, "none": 1}[length]


class PerplexitySpec(ScorerSettings):
    """Negative log-likelihood of the item's expected answer behind its prompt, in nats a token or a byte; an empty raw
    prompt: of a text by itself, without its first token. Of suites only.

    An item counts by its length, so that the mean over the items is that over all tokens or bytes of the suite, and its
    exponential (`perplexity`) the suite's perplexity.
    """

    type: Literal["perplexity"] = "perplexity"
    unit: Literal["token", "byte"] = "token"
    """Models with different tokenizers are compared by the byte."""

    always_compares: ClassVar[bool] = True
    better: ClassVar[Literal["higher", "lower"]] = "lower"

    def wrong_item(self, reference: Reference) -> str | None:
        """See ScorerSettings."""
        if len(reference.expected) > 1:
            return "expected: has several answers, and a perplexity is of one text"
        if reference.expected == ("",):
            return "expected: is empty, and a perplexity is of a text"
        return super().wrong_item(reference)

    def shown(self, prompt: str, reference: Reference) -> str:
        """See LikelihoodSpec."""
        del reference
        return prompt

    def continuations(self, reference: Reference) -> list[str]:
        """See LikelihoodSpec."""
        return list(reference.expected)

    def verdict(self, reference: Reference, found: Sequence[Likelihood]) -> Verdict:
        """See LikelihoodSpec."""
        del reference
        (likelihood,) = found
        units = likelihood.tokens if self.unit == "token" else likelihood.bytes
        return Verdict(-likelihood.logprob / units, weight=units)


def perplexity(mean: float) -> float:
    """Perplexity of a mean negative log-likelihood; also of the ends of its interval."""
    return math.exp(mean)


def bits(mean: float) -> float:
    """The same in bits: of a mean by the byte, the bits a byte."""
    return mean / math.log(2)


def _places(answer: str, choices: Sequence[str]) -> list[int]:
    """Places of the choices that an answer names by their text, or else by a letter. Published sets have choices that
    are the same: each is as right."""
    letter = LETTERS.find(answer) if len(answer) == 1 else -1
    if answer not in choices and 0 <= letter < len(choices):
        answer = choices[letter]
    return [place for place, choice in enumerate(choices) if choice == answer]
