"""Cut: which units of a checkpoint stay. As an object, a file, and a config.json of what is left. No torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import InvalidRequest
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.forge.files import FORMAT, read_object, write_object
from services.forge.units import MTP_LAYER, WIDTHS, Width, count, layer_path, places, step


@dataclass(frozen=True, slots=True)
class Cut:
    """Units of a checkpoint that stay, by their numbers in it."""

    layers: tuple[int, ...]
    """Layers, ascending."""
    kept: Mapping[Width, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """For each kind of which units go: layer path → units, ascending. Each remaining layer with such units has one
    entry, and all have as many units."""

    def check(self, config: Qwen3_5Config, *, mtp: bool) -> None:
        """Refuses a cut that the checkpoint cannot have.

        Args:
            mtp: the checkpoint has the layer that predicts the token after next.

        Raises:
            InvalidRequest: the message names the kind and what is possible.
        """
        if not _ascending(self.layers, config.num_layers):
            raise InvalidRequest(
                f"layers must be ascending numbers from 0 to {config.num_layers - 1}, got {list(self.layers)}",
                param="layers",
            )
        for kind in sorted(set(config.layer_types)):
            if all(config.layer_types[index] != kind for index in self.layers):
                raise InvalidRequest(f"at least one {kind} layer must stay", param="layers")
        for width, layers in self.kept.items():
            self._check_width(config, width, layers, mtp)

    def _check_width(
        self, config: Qwen3_5Config, width: Width, layers: Mapping[str, tuple[int, ...]], mtp: bool
    ) -> None:
        total, multiple = count(config, width), step(config, width)
        left = {layer_path(index) for index in self.layers} | {MTP_LAYER}
        wanted = left.intersection(places(config, width, mtp=mtp))
        if set(layers) != wanted:
            raise InvalidRequest(f"{width}: name the layers {sorted(wanted)}, got {sorted(layers)}", param=width)
        for path, units in layers.items():
            if not _ascending(units, total):
                raise InvalidRequest(
                    f"{width} of {path} must be ascending numbers from 0 to {total - 1}, at least one", param=width
                )
        numbers = {len(units) for units in layers.values()}
        if len(numbers) > 1:
            raise InvalidRequest(f"{width}: every layer keeps as many, got {sorted(numbers)}", param=width)
        if any(number % multiple and number != total for number in numbers):
            raise InvalidRequest(
                f"{width}: {numbers.pop()} of {total} cannot stay, only multiples of {multiple} can", param=width
            )

    def number(self, config: Qwen3_5Config, width: Width) -> int:
        """Units of a kind that a layer keeps."""
        return next((len(units) for units in self.kept.get(width, {}).values()), count(config, width))

    def of(self, width: Width, path: str) -> tuple[int, ...] | None:
        """Units that a layer keeps; None: all of them."""
        return self.kept.get(width, {}).get(path)


def _ascending(numbers: tuple[int, ...], limit: int) -> bool:
    return bool(numbers) and numbers[0] >= 0 and numbers[-1] < limit and list(numbers) == sorted(set(numbers))


def cut_config(data: Mapping[str, Any], config: Qwen3_5Config, cut: Cut) -> dict[str, Any]:
    """A parsed config.json with the numbers of what is left; everything else in it stays."""
    result = copy.deepcopy(dict(data))
    text = result.get("text_config", result)
    groups, heads = cut.number(config, "kv_groups"), cut.number(config, "key_heads")
    text |= {
        "num_key_value_heads": groups,
        "num_attention_heads": groups * (config.num_heads // config.num_kv_heads),
        "head_dim": config.head_dim,  # by default it would follow from the number of heads
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * (config.linear_value_heads // config.linear_key_heads),
        "intermediate_size": cut.number(config, "mlp_channels"),
        "num_hidden_layers": len(cut.layers),
        "layer_types": [config.layer_types[index] for index in cut.layers],
    }
    return result


@dataclass(frozen=True, slots=True)
class CutFile:
    """A cut of a certain checkpoint, and how it was chosen."""

    cut: Cut
    base_digest: str
    """services.engine.models.checkpoint.checkpoint_digest of the checkpoint that the numbers are of."""
    chosen: Mapping[str, Any]
    """Recipe: levels, method, digest of the scores, calibration data."""

    def write(self, path: Path) -> None:
        """Writes the file, which must not be there. Raises InvalidRequest."""
        content = {
            "format": FORMAT,
            "base_digest": self.base_digest,
            "chosen": self.chosen,
            "layers": self.cut.layers,
            "kept": self.cut.kept,
        }
        write_object(path, content)

    def require(self, digest: str) -> None:
        """Refuses another checkpoint than the cut's. Raises InvalidRequest."""
        if self.base_digest != digest:
            raise InvalidRequest(
                f"the cut belongs to a checkpoint of digest {self.base_digest[:12]}, this one's is {digest[:12]}: "
                "choose its units anew",
                param="cut",
            )

    @classmethod
    def read(cls, path: Path) -> CutFile:
        """Reads the file.

        Raises:
            InvalidRequest: it cannot be read or is malformed.
        """
        data = read_object(path, "a cut of `temper forge prune`")
        try:
            kept = {
                width: {str(layer): _numbers(units) for layer, units in layers.items()}
                for width, layers in data["kept"].items()
            }
            if unknown := kept.keys() - set(WIDTHS):
                raise ValueError(f"unknown kinds {sorted(unknown)}")
            return cls(Cut(_numbers(data["layers"]), kept), str(data["base_digest"]), dict(data["chosen"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(f"{path} is no cut of `temper forge prune`: {error!r}", param="cut") from error


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        raise ValueError("units must be lists of integers")
    return tuple(value)
