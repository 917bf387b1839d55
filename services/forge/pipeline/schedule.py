"""Schedule of a pruning over several cycles: what each cycle takes of each kind of units. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.common.jobs.kinds.forge import ForgePrune
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.forge.cut import Cut
from services.forge.levels import Level
from services.forge.units import KINDS, MTP_LAYER, WIDTHS, Kind, Width, count, layer_path, places, step


@dataclass(frozen=True, slots=True)
class Schedule:
    """Units that go in each cycle."""

    cycles: tuple[Mapping[Kind, int], ...]
    """Of each cycle: kind → units that go, of those that are there then. No cycle is empty."""
    left: Mapping[Kind, int]
    """Kind → units that are left in the end."""

    @classmethod
    def of(cls, config: Qwen3_5Config, prune: ForgePrune) -> Schedule:
        """Divides the levels of a recipe evenly.

        Args:
            config: of the model before any cut.

        Raises:
            InvalidRequest: a level is impossible, or there are more cycles than steps to take; says what is possible.
        """
        gone: dict[Kind, int] = {
            kind: Level.parse(prune.levels[kind], kind).removed(config, kind) for kind in KINDS if kind in prune.levels
        }
        before = dict.fromkeys(gone, 0)
        cycles: list[dict[Kind, int]] = []
        for cycle in range(1, prune.cycles + 1):
            after = {kind: _gone(config, kind, number * cycle / prune.cycles) for kind, number in gone.items()}
            after = gone if cycle == prune.cycles else after
            taken = {kind: after[kind] - before[kind] for kind in gone if after[kind] > before[kind]}
            if not taken:
                raise InvalidRequest(
                    f"prune.cycles: {prune.cycles} cycles cannot each take a part of {_told(gone)}: in cycle {cycle} "
                    f"nothing would go; take at most {_most(config, gone)}",
                    param="prune.cycles",
                )
            cycles.append(taken)
            before = after
        return cls(tuple(cycles), {kind: count(config, kind) - number for kind, number in gone.items()})


def _gone(config: Qwen3_5Config, kind: Kind, wanted: float) -> int:
    """Units that are gone after a part of the way: what is left is a multiple of the kind's step."""
    total, multiple = count(config, kind), step(config, kind)
    return total - round((total - wanted) / multiple) * multiple if multiple > 1 else int(wanted)


def _most(config: Qwen3_5Config, gone: Mapping[Kind, int]) -> int:
    """Cycles that can each take something."""
    return max(max(1, number // step(config, kind)) for kind, number in gone.items())


def _told(gone: Mapping[Kind, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in gone.items())


def nominal_cut(config: Qwen3_5Config, left: Mapping[Kind, int], *, mtp: bool) -> Cut:
    """A cut of the right sizes, for plans: which units stay is known only once their importance is. Layers are taken
    evenly, and one of each type is among them."""
    number = left.get("layers", config.num_layers)
    layers = {config.layer_types.index(kind) for kind in set(config.layer_types)}
    order = sorted(range(config.num_layers), key=lambda index: (index * number % config.num_layers, index))
    for index in order:
        if len(layers) < number:
            layers.add(index)
    paths = {layer_path(index) for index in layers} | {MTP_LAYER}
    kept: dict[Width, dict[str, tuple[int, ...]]] = {
        width: {path: tuple(range(left[width])) for path in places(config, width, mtp=mtp) if path in paths}
        for width in WIDTHS
        if width in left
    }
    return Cut(tuple(sorted(layers)), kept)
