"""Neighbours of a cut: the tensors that trained with units which are gone. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import InvalidRequest
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.forge.units import WIDTHS, Width, layer_path, parts, places

_NORMS = ("norm.weight", "layernorm.weight")


@dataclass(frozen=True, slots=True)
class LastCut:
    """The last cut of a forged checkpoint, in the checkpoint's own numbers."""

    widths: tuple[Width, ...]
    """Kinds of units inside layers that went."""
    layers: tuple[int, ...]
    """Layers in front of and behind those that went."""

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], directory: Path) -> LastCut:
        """The cut that records tell of (services.forge.record.history).

        Raises:
            InvalidRequest: none of them is of a compaction.
        """
        steps = [step for record in records for step in (*record.get("stages", ()), record)]  # a run's are inside it
        record = next((step for step in reversed(steps) if step.get("step") == "compact"), None)
        if record is None:
            raise InvalidRequest(
                f"the records of {directory} tell of no cut, so its neighbours are not known: recover a checkpoint of "
                "`temper forge compact`, or train lora",
                param="trains",
            )
        try:
            shape, kept = record["plan"]["shape"], [int(layer) for layer in record["recipe"]["layers"]]
            before = int(shape["layers"][0]) if "layers" in shape else len(kept)
            widths = tuple(width for width in WIDTHS if width in shape)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the record of {directory} is malformed: {error!r}", param="model") from error
        gone = sorted(set(range(before)) - set(kept))
        beside = {place for place, layer in enumerate(kept) for other in gone if _adjoins(layer, other, kept)}
        return cls(widths, tuple(sorted(beside)))

    def tensors(self, config: Qwen3_5Config) -> list[str]:
        """Canonical names of what is trained, in the checkpoint's order: all norms, what is left of the tensors that
        units were cut out of, and all tensors with units of the layers beside those that went."""
        inside = parts(config)
        chosen = {
            f"{layer}.{path}"
            for path, part in inside.items()
            if part.width in self.widths
            for layer in places(config, part.width, mtp=False)
        }
        chosen |= {f"{layer_path(layer)}.{path}" for layer in self.layers for path in inside}
        return [name for name in config.tensor_shapes() if name in chosen or name.endswith(_NORMS)]


def _adjoins(layer: int, gone: int, kept: Sequence[int]) -> bool:
    """Whether no other kept layer lies between the two."""
    low, high = sorted((layer, gone))
    return not any(low < other < high for other in kept)
