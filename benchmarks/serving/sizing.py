"""Writes the table of docs/guides/sizing.md: what the memory plan makes of each card, for the 4B shape.

`python -m benchmarks.serving.sizing [--check]`. The plan is the engine's own (services.pod.memory), made for a card
that is not there: nothing is loaded, no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lib.random_checkpoint import config_of
from services.common.errors import DoesNotFit
from services.engine.kv_cache.memory_plan import MemoryPlan
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import Quantization
from services.engine.models.lora.targets import target_shapes
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.settings import EngineSettings
from services.pod.device import Device
from services.pod.memory import plan
from services.trainer.memory.estimate import Workload, estimate

TARGET = Path(__file__).resolve().parents[2] / "docs" / "guides" / "sizing.md"
SHAPE = "qwen3.5-4b"
_GIB = 2**30
_RANK = 16
_LONGEST = 262144


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a part of one.

    Args:
        names: of such cards.
        free: GiB that a process finds free on it, which is less than its name says: ECC, and CUDA's context.
        capability: the lowest of them.
    """

    names: str
    free: float
    capability: tuple[int, int]


CARDS = (
    Card("A10G, RTX 3090, 24 GB", 22.0, (8, 6)),
    Card("L4, RTX 4090, 24 GB", 22.0, (8, 9)),
    Card("A100, 40 GB", 38.9, (8, 0)),
    Card("H100 MIG 3g.40gb", 38.9, (9, 0)),
    Card("L40S, 48 GB", 44.0, (8, 9)),
    Card("A100, 80 GB", 78.7, (8, 0)),
    Card("H100, 80 GB", 78.7, (9, 0)),
    Card("H200, 141 GB", 139.2, (9, 0)),
)

_BEGIN, _END = "<!-- table -->\n", "<!-- /table -->\n"
_COLUMNS = (
    *("card", "free", "weights", "stored", "sequences", "states", "adapters", "other", "KV"),
    *("tokens of context", "training", "a job's longest document"),
)


def rows() -> Iterator[str]:
    """A line of the table for each card and each way to store the weights that it can."""
    config = Qwen3_5Config.from_dict(config_of(SHAPE))
    for card in CARDS:
        device = Device("cuda", card.names, card.capability, "3.6.0")
        kinds: tuple[Quantization, ...] = ("none", "fp8", "int4") if device.has_float8 else ("none", "int4")
        for kind in kinds:
            settings = EngineSettings(quantization=kind, device="cuda")
            try:
                chosen, made = plan(config, settings, torch.bfloat16, device, int(card.free * _GIB))
            except DoesNotFit:
                yield _line(card.names, f"{card.free:g}", "does not fit", kind, *[""] * (len(_COLUMNS) - 4))
                continue
            other = made.workspace + made.sampler + made.graphs
            parts = (made.states, made.adapters, other, made.kv)
            yield _line(
                *(card.names, f"{card.free:g}", f"{made.weights / _GIB:.1f}", kind, str(chosen.max_num_seqs)),
                *(f"{part / _GIB:.1f}" for part in parts),
                *(f"{made.capacity_tokens:,}", f"{made.training / _GIB:.1f}", f"{_longest(config, made):,}"),
            )


def _longest(config: ModelConfig, made: MemoryPlan) -> int:
    """Tokens of the longest microbatch that training's part holds, found by halving."""
    numbers = sum(_RANK * (out + into) for out, into in target_shapes(config).values())
    low, high = 0, _LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        work = Workload(numbers, _RANK, middle, 2, "full", fused=True)
        low, high = (middle, high) if estimate(config, work).total <= made.training else (low, middle - 1)
    return low


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def render(page: str) -> str:
    """The page with its table as it should be now."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    table = "\n".join((_line(*_COLUMNS), "|---" * len(_COLUMNS) + "|", *rows()))
    return f"{before}{_BEGIN}{table}\n{_END}{after}"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    page = TARGET.read_text()
    if parser.parse_args().check:
        current = page == render(page)
        if not current:
            sys.stderr.write(f"{TARGET.name} is not current: run `python -m benchmarks.serving.sizing`\n")
        return 0 if current else 1
    TARGET.write_text(render(page))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
