"""Cost model of a step: seconds by what it holds, fitted to measured steps.

A step takes a constant, more with each sequence that decodes and with each prompt token, piecewise linear in both, and
a little for each token that is attended to. Every coefficient is at least 0: more work never takes less time.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

DECODES = (0, 1, 8, 16, 32, 64, 128, 192, 256)
"""Numbers of decodes between which a step's time is a straight line."""
PREFILL = (0, 512, 4096, 16384)
"""The same of prompt tokens."""
_MOST_STEPS = 4
"""Weight of a kind of step, at most: a decode that was measured 250 times does not drown the prefill measured once."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Steps of one kind as they were measured."""

    decodes: int
    prefill: int
    context: float
    """Tokens that the decodes attend to, all together."""
    pairs: float
    """Pairs of a prompt token and a token that it attends to."""
    seconds: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step.

    Raises:
        ValueError: tables and knots differ in length, or a time falls with more work.
    """

    decode_seconds: tuple[float, ...]
    """At each of DECODES, without attention; the first is the constant part of every step."""
    prefill_seconds: tuple[float, ...]
    """What prompt tokens add, at each of PREFILL; the first is added by any."""
    context_second: float
    """Of one token that a decode attends to."""
    pair_second: float
    """Of one token that a prompt token attends to."""

    def __post_init__(self) -> None:
        for knots, table in ((DECODES, self.decode_seconds), (PREFILL, self.prefill_seconds)):
            if len(table) != len(knots) or list(table) != sorted(table):
                raise ValueError(f"{table} must ascend and have {len(knots)} entries")
        if min(self.decode_seconds[0], self.prefill_seconds[0], self.context_second, self.pair_second) < 0:
            raise ValueError(f"{self} has a negative time")

    def seconds(self, decodes: int, context: float, prefill: int, pairs: float) -> float:
        """Seconds of a step; see MeasuredStep."""
        spent = _at(DECODES, self.decode_seconds, decodes) + self.context_second * context
        if prefill:
            spent += _at(PREFILL, self.prefill_seconds, prefill) + self.pair_second * pairs
        return spent

    @property
    def token_seconds(self) -> float:
        """Seconds of one prompt token of a long chunk, without attention."""
        return (self.prefill_seconds[2] - self.prefill_seconds[1]) / (PREFILL[2] - PREFILL[1])

    def decode_share(self, decodes: int, context: float) -> float:
        """Seconds that a token of one of so many sequences takes of the device.

        Args:
            context: tokens of one sequence.
        """
        return self.seconds(decodes, decodes * context, 0, 0.0) / decodes

    @classmethod
    def fit(
        cls, steps: Sequence[MeasuredStep], context_second: float | None = None, pair_second: float | None = None
    ) -> CostModel:
        """Least squares of the relative errors.

        Args:
            context_second: of attention, where the steps do not tell; None: they do.
            pair_second: the same.
        """
        given = (context_second or 0.0, pair_second or 0.0)
        rows = [_row(step, context_second is None, pair_second is None) for step in steps]
        left = [one.seconds - given[0] * one.context - given[1] * one.pairs for one in steps]
        weights = np.array([min(one.count, _MOST_STEPS) ** 0.5 / one.seconds for one in steps])
        found = _not_negative(np.array(rows) * weights[:, None], np.array(left) * weights)
        ends = len(DECODES), len(DECODES) + len(PREFILL)
        return cls(
            _table(DECODES, found[: ends[0]], max(step.decodes for step in steps)),
            _table(PREFILL, found[ends[0] : ends[1]], max(step.prefill for step in steps)),
            float(found[ends[1]]) if context_second is None else context_second,
            float(found[ends[1] + 1]) if pair_second is None else pair_second,
        )

    def error(self, steps: Sequence[MeasuredStep]) -> float:
        """Mean relative error over measured steps, each kind counted once."""
        errors = [
            abs(self.seconds(one.decodes, one.context, one.prefill, one.pairs) / one.seconds - 1.0) for one in steps
        ]
        return sum(errors) / len(errors)


def _at(knots: Sequence[int], table: Sequence[float], value: int) -> float:
    """The value of a piecewise linear function; behind the last knot its last slope goes on."""
    above = min(max(bisect_left(knots, value), 1), len(knots) - 1)
    low, high = knots[above - 1], knots[above]
    return table[above - 1] + (table[above] - table[above - 1]) * (value - low) / (high - low)


def _ramps(knots: Sequence[int], value: int) -> list[float]:
    """Shares of the rises between knots that a value has behind it."""
    ramps = [min(max(value - low, 0) / (high - low), 1.0) for low, high in pairwise(knots)]
    if value > knots[-1]:
        ramps[-1] = (value - knots[-2]) / (knots[-1] - knots[-2])
    return ramps


def _table(knots: Sequence[int], rises: np.ndarray[Any, Any], most: int) -> tuple[float, ...]:
    """Values at the knots. Beyond ``most``, which nobody measured, the last slope that somebody did goes on."""
    rises = rises.copy()
    for place in range(2, len(knots)):
        if knots[place - 1] >= most:
            slope = rises[place - 1] / (knots[place - 1] - knots[place - 2])
            rises[place] = slope * (knots[place] - knots[place - 1])
    return tuple(np.cumsum(rises).tolist())


def _row(step: MeasuredStep, context: bool, pairs: bool) -> list[float]:
    prefill = [1.0, *_ramps(PREFILL, step.prefill)] if step.prefill else [0.0] * len(PREFILL)
    attention = [step.context if context else 0.0, step.pairs if pairs else 0.0]
    return [1.0, *_ramps(DECODES, step.decodes), *prefill, *attention]


def _not_negative(rows: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Least squares whose coefficients are not negative: those that would be are left out, the worst first."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    kept = [column for column in range(rows.shape[1]) if np.any(rows[:, column])]
    found = np.zeros(rows.shape[1])
    while kept:
        part = np.linalg.lstsq(rows[:, kept] / scale[kept], values, rcond=1e-9)[0]
        if part.min() >= 0:
            found[kept] = part / scale[kept]
            return found
        del kept[int(part.argmin())]
    raise ValueError("no step takes any time")


def read_steps(path: Path, quant: str = "none") -> list[MeasuredStep]:
    """Steps of a file of benchmarks.serving.rates, those without adapters, speculation and other settings."""
    lines = (json.loads(line) for line in path.read_text().splitlines() if line.startswith("{"))
    plain = (
        one
        for one in lines
        if isinstance(one.get("steps"), list) and one["quant"] == quant and not one["lora"] and not one["settings"]
    )
    return [step for one in plain for step in _steps_of(one)]


def _steps_of(result: dict[str, Any]) -> Iterable[MeasuredStep]:
    prompt, new = result["in"], result["out"]
    # Rows name the upper end of a bucket of decodes; a run's whole batch is exact.
    for step in result["steps"]:
        decodes = min(step["decodes"], result["c"])
        yield MeasuredStep(
            decodes,
            step["prefill"],
            decodes * (prompt + new / 2),
            step["prefill"] * prompt / 2,
            step["ms"] / 1e3,
            step["steps"],
        )
