"""Decode rates of the 4B model by card: measured where there is a result, otherwise predicted from the H100's.

A prediction is the rate at which a step's bytes pass at the card's nominal bandwidth, times the share of it that the
H100 reaches with the same weights and as many requests, times what the cuts for less shared memory leave of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.serving.cards.plans import Planned, planned, quantizations
from benchmarks.serving.cards.table import CARDS, Card, card
from benchmarks.serving.floor import step_bytes
from kernels.gpu.launch.device import Size
from services.engine.models.footprint import Quantization

SHAPE = "qwen3.5-4b"
REQUESTS = (1, 64)
REFERENCE = "H100, 80 GB"
PROMPT, NEW = 512, {1: 128, 64: 256}
"""Tokens of a request, and new ones by the number of requests, as in the results."""
_RESULTS = Path(__file__).resolve().parents[2] / "results"
RESULTS: Mapping[str, tuple[str, ...]] = {
    REFERENCE: ("2026-11-26-h100-short-prompts-serving-after.jsonl",),
    "H200, 141 GB": ("2026-11-26-h200-packages-serving-after.jsonl", "2026-11-22-h200-serving-4.jsonl"),
}
"""Results of benchmarks.serving.rates by card, the first to count first."""
SMALLER_CUTS: Mapping[Size, Mapping[int, float]] = {
    "small": {1: 0.94, 64: 0.95},
    "large": {1: 0.94, 64: 0.95},
    "wide": {1: 1.0, 64: 1.0},
}
"""Share of the rate that an H100 keeps with the cuts for less shared memory (TEMPER_DEVICE_LIMITS of sm80, sm86,
sm89 and sm120, 2026-11-26), by requests."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Decoded tokens a second of all requests together."""

    tokens: float
    measured: bool
    floor: float
    """Rate at which a step's bytes pass at the nominal bandwidth."""

    @property
    def share(self) -> float:
        """Share of the floor."""
        return self.tokens / self.floor


def rate(on: Card, stored: Quantization, requests: int) -> Rate | None:
    """Rate of a card, measured or predicted; None: its memory does not hold so many requests."""
    predicted = prediction(on, stored, requests)
    found = _measured(on.name).get((stored, requests))
    if predicted is None or found is None:
        return predicted
    return Rate(found, True, predicted.floor)


def prediction(on: Card, stored: Quantization, requests: int) -> Rate | None:
    """Predicted rate of a card; None: its memory does not hold so many requests."""
    made, best = planned(SHAPE, on, stored), planned(SHAPE, card(REFERENCE), stored)
    if made is None or best is None or made.sequences < requests:
        return None
    if made.context < requests * (PROMPT + NEW[requests]):
        return None
    floor = _floor(on, made, requests)
    reached = _measured(REFERENCE)[stored, requests] / _floor(card(REFERENCE), best, requests)
    return Rate(floor * reached * SMALLER_CUTS[on.limits.size][requests], False, floor)


def rates() -> Mapping[tuple[str, Quantization, int], Rate]:
    """Rates of every card that has one, by card, storage and requests."""
    found: dict[tuple[str, Quantization, int], Rate] = {}
    for each in CARDS:
        for stored in quantizations(each):
            for requests in REQUESTS:
                if (made := rate(each, stored, requests)) is not None:
                    found[each.name, stored, requests] = made
    return found


def flop_by_byte(stored: Quantization, requests: int) -> float:
    """Multiplications and additions of a step's products for each byte that it moves, on the reference card."""
    made = planned(SHAPE, card(REFERENCE), stored)
    if made is None:
        raise ValueError(f"{REFERENCE} does not hold {SHAPE} stored as {stored}")
    linears = (made.config.linear_shapes(layer).values() for layer in range(made.config.num_layers))
    numbers = sum(out * into for shapes in linears for out, into in shapes)
    numbers += made.config.vocab_size * made.config.hidden_size
    return 2 * numbers * requests / _step_bytes(made, requests)


def _floor(on: Card, made: Planned, requests: int) -> float:
    return requests * on.bandwidth * 1e9 / _step_bytes(made, requests)


def _step_bytes(made: Planned, requests: int) -> float:
    return sum(step_bytes(made.config, made.formats, requests, PROMPT + NEW[requests] // 2).values())


@cache
def _measured(name: str) -> Mapping[tuple[str, int], float]:
    """Measured rates of a card with default settings and no adapter, by storage and requests."""
    found: dict[tuple[str, int], float] = {}
    for file in RESULTS.get(name, ()):
        for line in (_RESULTS / file).read_text().splitlines():
            record = json.loads(line)
            plain = (record["model"], record["lora"], record["kv"], record["state"], record["settings"])
            if plain != (SHAPE, 0, "auto", "float32", []) or record["batch_invariant"]:
                continue
            if (record["in"], record["out"]) == (PROMPT, NEW.get(record["c"])):
                found.setdefault((record["quant"], record["c"]), record["decode_tok_s"])
    return found
