"""How far a version moves the base model on prompts: from log-probabilities that the server tells of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROMPTS = (
    "What is 3 + 4?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Explain what a prime number is.",
    "Translate to French: Good morning.",
    "What is the capital of Italy?",
    "Continue: Once upon a time there was",
    'Answer in JSON with the key "ok": is water wet?',
)
"""Prompts that stay the same between releases, so that figures can be compared."""
Told = Mapping[int, float]
"""Log-probabilities of the likeliest tokens of one position, by token id."""


@dataclass(slots=True)
class Movement:
    """What was measured so far, over positions of answers of the base model."""

    kl: list[float] = field(default_factory=list)
    agreed: int = 0
    largest_shift: float = 0.0

    def add(self, base: Sequence[Told], moved: Sequence[Told]) -> None:
        """Adds positions, in the same order.

        Raises:
            ValueError: a log-probability is not finite.
        """
        for one, other in zip(base, moved, strict=True):
            if not all(map(math.isfinite, (*one.values(), *other.values()))):
                raise ValueError("a log-probability is not finite")
            self.kl.append(divergence(one, other))
            self.agreed += max(one, key=one.__getitem__) == max(other, key=other.__getitem__)
            shifts = [abs(value - other[token]) for token, value in one.items() if token in other]
            self.largest_shift = max(self.largest_shift, *shifts, 0.0)

    def figures(self) -> dict[str, float]:
        """The figures. Raises ValueError: there are no positions."""
        if not self.kl:
            raise ValueError("the base model answered nothing to any prompt")
        return {
            "tokens": len(self.kl),
            "kl_mean": math.fsum(self.kl) / len(self.kl),
            "kl_max": max(self.kl),
            "agreement": self.agreed / len(self.kl),
            "largest_shift": self.largest_shift,
        }


def divergence(base: Told, moved: Told) -> float:
    """KL(base ‖ moved) in nats of the tokens that both tell, with all others as one: never more than that of the whole
    distributions."""
    common = base.keys() & moved.keys()
    total = sum(math.exp(base[token]) * (base[token] - moved[token]) for token in common)
    rest, other = (max(0.0, 1 - sum(math.exp(told[token]) for token in common)) for told in (base, moved))
    if rest > _LEAST:
        total += rest * (math.log(rest) - math.log(max(other, _LEAST)))
    return max(0.0, total)


_LEAST = 1e-9


def over_bounds(figures: Mapping[str, float], bounds: Mapping[str, float | None]) -> list[str]:
    """Figures that are over (agreement: under) what they may be."""
    found = []
    for name, bound in bounds.items():
        if bound is None:
            continue
        value = figures[name]
        if value < bound if name == "agreement" else value > bound:
            found.append(f"{name} is {value:.4g}, {'under' if name == 'agreement' else 'over'} {bound:g}")
    return found


def verification(answer: Mapping[str, Any]) -> str:
    """The figures in words, as rich markup."""
    norms = "  ".join(f"{kind} {value:.3g}" for kind, value in answer["norms"].items())
    return "\n".join(
        (
            f"[bold]{answer['version']}[/] beside the base model, {answer['tokens']} tokens of "
            f"{answer['prompts']} answers",
            f"  kl a token     {answer['kl_mean']:.4g} on average, {answer['kl_max']:.4g} at most (lower bounds)",
            f"  agreement      {answer['agreement']:.1%} of tokens are the likeliest of both",
            f"  largest shift  {answer['largest_shift']:.4g} of a log-probability",
            f"  norm           {answer['norm']:.4g} of all it adds: {norms}",
            f"  finite         {'yes' if answer['finite'] else 'no'}",
        )
    )
