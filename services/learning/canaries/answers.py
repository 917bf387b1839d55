"""Answers of a canary as numbers: what a gateway counts of each, with the signs of a policy that has gone astray."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

from services.common.text.output_parser import Delta, TextDelta
from services.learning.canaries.refusals import refuses

_GRAM = 4
_MOST_REPEATED = 0.5
"""Share of 4-grams that are repeated, seq-rep-4 of Welleck et al. (arXiv:1908.04319), above which an answer counts."""
_FEWEST, _MOST = 32, 2048
"""Tokens that are looked at: of a shorter answer it says nothing, of a longer one the last ones tell."""
_MARKUP = ("<tool_call>", "</tool_call>")
_CUT_OFF = "length"


@dataclass(slots=True)
class Counts:
    """Sums over answers; those of parts add up. Amounts are also summed as logarithms, for ratios."""

    answers: int = 0
    errors: int = 0
    cut_off: int = 0
    repetition: int = 0
    calls: int = 0
    broken_calls: int = 0
    refusals: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    log_tokens: float = 0.0
    log_tokens_squares: float = 0.0
    log_seconds: float = 0.0
    log_seconds_squares: float = 0.0

    def add(self, other: Counts) -> None:
        """Adds those of another part."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    @property
    def whole(self) -> int:
        """Answers that came to their end."""
        return self.answers - self.errors


@dataclass(slots=True)
class AnswerInCanary:
    """One answer so far. `take` runs on the event loop for every step, and only keeps what it is given.

    Args:
        refusals: openings of answers that refuse.
    """

    refusals: Sequence[str] = ()

    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    def take(self, deltas: Sequence[Delta], tokens: Sequence[int]) -> None:
        """Takes a step."""
        if self.first is None:
            self.first = time.monotonic()
        self.deltas += deltas
        self.tokens += tokens

    def ended(self, finish_reason: str) -> Counts:
        """Counts of an answer that came to its end."""
        now = time.monotonic()
        seconds = now - self.began
        log_tokens, log_seconds = math.log1p(len(self.tokens)), math.log(max(seconds, 1e-3))
        cut_off = finish_reason == _CUT_OFF
        called, broken = calls_of(self.deltas, cut_off=cut_off)
        return Counts(
            answers=1,
            cut_off=int(cut_off),
            repetition=int(repeats(self.tokens)),
            calls=int(called),
            broken_calls=int(broken),
            refusals=int(not called and refuses(text_of(self.deltas), self.refusals)),
            tokens=len(self.tokens),
            seconds=seconds,
            first_seconds=(now if self.first is None else self.first) - self.began,
            log_tokens=log_tokens,
            log_tokens_squares=log_tokens**2,
            log_seconds=log_seconds,
            log_seconds_squares=log_seconds**2,
        )


def failed_answer() -> Counts:
    """Counts of an answer that failed."""
    return Counts(answers=1, errors=1)


def repeats(tokens: Sequence[int]) -> bool:
    """True if an answer says the same again and again."""
    seen = tokens[-_MOST:]
    if len(seen) < _FEWEST:
        return False
    grams = list(zip(*(seen[start:] for start in range(_GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) > _MOST_REPEATED


def text_of(deltas: Iterable[Delta]) -> str:
    """Text that a user reads of an answer."""
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta) and not delta.reasoning)


def calls_of(deltas: Iterable[Delta], *, cut_off: bool) -> tuple[bool, bool]:
    """Whether an answer calls tools, and whether one of its calls is broken: its arguments are no JSON object, or its
    markup stands in the text. What the token limit cut off is not broken."""
    deltas = list(deltas)
    text = text_of(deltas)
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            continue
        if delta.name is not None:
            arguments.append([delta.arguments])
        else:
            arguments[-1].append(delta.arguments)
    stray = any(tag in text for tag in _MARKUP)
    broken = not cut_off and (stray or not all(_is_object("".join(parts)) for parts in arguments))
    return bool(arguments) or stray, broken


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def counts_json(arms: dict[str, Counts]) -> str:
    """What a gateway has counted of each arm, as it is kept."""
    return json.dumps({arm: asdict(counts) for arm, counts in arms.items()})


def counts_of(kept: Iterable[str]) -> dict[str, Counts]:
    """Sums over gateways. Numbers that this release does not know are left out."""
    known = {one.name for one in fields(Counts)}
    sums: dict[str, Counts] = {}
    for one in kept:
        for arm, numbers in json.loads(one).items():
            part = Counts(**{name: value for name, value in numbers.items() if name in known})
            sums.setdefault(arm, Counts()).add(part)
    return sums
