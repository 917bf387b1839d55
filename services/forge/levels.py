"""Levels of pruning, and the units that go at a level: those with the lowest scores. Without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.forge.cut import Cut
from services.forge.importance.scores import Scores
from services.forge.units import MTP_LAYER, WIDTHS, Kind, Width, count, layer_path, places, step

_LEVEL = re.compile(r"(\d+(?:\.\d+)?)(%?)")
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Level:
    """How much of a kind goes: "25%" of the units, or a number of them. MLP channels go to the nearest width that is
    possible; a share of other units must be a whole number of them."""

    text: str
    amount: float
    share: bool

    @classmethod
    def parse(cls, text: str, kind: Kind) -> Level:
        """Reads "25%" or "2".

        Raises:
            InvalidRequest: it is neither.
        """
        match = _LEVEL.fullmatch(text.strip())
        share = match is not None and match[2] == "%"
        if match is None or (not share and "." in match[1]):
            raise InvalidRequest(f"{kind}: write a share like 25%, or a number of units, not {text!r}", param=kind)
        return cls(text.strip(), float(match[1]) / 100 if share else float(match[1]), share)

    def removed(self, config: Qwen3_5Config, kind: Kind) -> int:
        """Units that go, of all layers or of each layer. One layer of each type stays.

        Raises:
            InvalidRequest: impossible; the message says what is possible.
        """
        total, multiple = count(config, kind), step(config, kind)
        wanted = self.amount * total if self.share else self.amount
        if multiple > 1 and self.share:
            left = max(multiple, round((total - wanted) / multiple + _CLOSE) * multiple)
            number = total - left if wanted < total else total
        else:
            number = round(wanted)
        most = total - len(set(config.layer_types)) if kind == "layers" else total - 1
        possible = (total - number) % multiple == 0 and 0 < number <= most
        if not possible or (multiple == 1 and abs(number - wanted) > _CLOSE * total):
            raise InvalidRequest(
                f"{kind}: {self.text} of {total} cannot go; possible are {_possible(total, multiple, most)}",
                param=kind,
            )
        return number


def _possible(total: int, multiple: int, most: int) -> str:
    numbers = [total - left for left in range(total - 1, total - most - 1, -1) if left % multiple == 0]
    if not numbers:
        return "none"
    named = [f"{number} ({number / total:.4g} of them)" for number in numbers]
    return ", ".join(named) if len(named) <= 8 else f"{', '.join(named[:3])} … {named[-1]}, in steps of {multiple}"


def choose(config: Qwen3_5Config, scores: Scores, levels: Mapping[Kind, Level], *, mtp: bool) -> Cut:
    """Units that stay: in each layer those with the highest scores, of equal ones the first.

    Args:
        scores: checked against the config.
        mtp: the checkpoint has the layer that predicts the token after next.

    Raises:
        InvalidRequest: no level, an impossible one, or one of a kind that has no scores.
    """
    if not levels:
        raise InvalidRequest("say what is to go: layers, kv_groups, key_heads or mlp_channels", param="levels")
    layers = tuple(range(config.num_layers))
    if "layers" in levels:
        if not scores.layers:
            raise _unscored("layers")
        layers = _layers(config, scores, levels["layers"].removed(config, "layers"))
    left = {layer_path(index) for index in layers} | {MTP_LAYER}
    kept: dict[Width, dict[str, tuple[int, ...]]] = {}
    for width in WIDTHS:
        if width not in levels:
            continue
        if width not in scores.widths:
            raise _unscored(width)
        number = count(config, width) - levels[width].removed(config, width)
        kept[width] = {
            path: _highest(scores.widths[width][path], number)
            for path in places(config, width, mtp=mtp)
            if path in left
        }
    cut = Cut(layers, kept)
    cut.check(config, mtp=mtp)
    return cut


def _unscored(kind: Kind) -> InvalidRequest:
    return InvalidRequest(f"the scores say nothing of {kind}: measure them, too", param=kind)


def _highest(scores: Sequence[float], number: int) -> tuple[int, ...]:
    order = sorted(range(len(scores)), key=lambda unit: (-scores[unit], unit))
    return tuple(sorted(order[:number]))


def _layers(config: Qwen3_5Config, scores: Scores, number: int) -> tuple[int, ...]:
    """Layers that stay, of a number that Level.removed() allows. The last of its type stays whatever its score."""
    left = list(range(config.num_layers))
    for index in sorted(left, key=lambda layer: (scores.layers[layer], -layer)):
        kind = config.layer_types[index]
        if config.num_layers - len(left) < number and sum(config.layer_types[other] == kind for other in left) > 1:
            left.remove(index)
    return tuple(left)
