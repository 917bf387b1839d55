"""Cases of a serving benchmark, and percentiles of what they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cli.http.load.figures import percentile


@dataclass(frozen=True, slots=True)
class Case:
    """c requests at once."""

    requests: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Case of the text "64x512x256".

        Raises:
            ValueError: it is not three positive numbers, the last above 1.
        """
        numbers = [int(part) for part in text.split("x")]
        if len(numbers) != 3 or min(numbers) < 1 or numbers[2] < 2:
            raise ValueError(f"a case is REQUESTSxPROMPTxNEW with at least 2 new tokens, got {text!r}")
        return cls(*numbers)


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of seconds, in milliseconds."""
    return {"p50": round(1e3 * percentile(values, 0.5), 3), "p99": round(1e3 * percentile(values, 0.99), 3)}
