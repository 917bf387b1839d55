"""Scores of a checkpoint's units, as a file: what they were measured on is in it by digest. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import InvalidRequest
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.forge.files import FORMAT, read_object, write_object
from services.forge.units import WIDTHS, Width, count, places

_WHAT = "scores of `temper forge importance`"


@dataclass(frozen=True, slots=True)
class Scores:
    """Importance of each unit. Units of one layer are comparable with each other, and layers with layers."""

    method: str
    base_digest: str
    """services.engine.models.checkpoint.checkpoint_digest of the checkpoint whose units these are."""
    layers: Sequence[float] = ()
    """One a layer, or none."""
    widths: Mapping[Width, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Kind → layer path → one a unit."""
    data: Mapping[str, Any] | None = None
    """Calibration data: name, sha256, documents, tokens; None: the method needs none."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def check(self, config: Qwen3_5Config, base_digest: str, *, mtp: bool) -> None:
        """Refuses scores of another checkpoint.

        Raises:
            InvalidRequest
        """
        if self.base_digest != base_digest:
            raise InvalidRequest(
                f"the scores belong to a checkpoint of digest {self.base_digest[:12]}, this one's is "
                f"{base_digest[:12]}: measure its importance anew",
                param="scores",
            )
        if self.layers and len(self.layers) != config.num_layers:
            raise InvalidRequest(
                f"the scores are of {len(self.layers)} layers, not {config.num_layers}", param="scores"
            )
        for width, by_layer in self.widths.items():
            wanted = set(places(config, width, mtp=mtp))
            total = count(config, width)
            if set(by_layer) != wanted or any(len(units) != total for units in by_layer.values()):
                raise InvalidRequest(
                    f"the scores of {width} are not those of {total} units in each of {sorted(wanted)}", param="scores"
                )

    def write(self, path: Path) -> None:
        """Writes the file, which must not be there. Raises InvalidRequest."""
        content = {
            "format": FORMAT,
            "method": self.method,
            "base_digest": self.base_digest,
            "data": self.data,
            "settings": self.settings,
            "layers": self.layers,
            "widths": self.widths,
        }
        write_object(path, content)

    @classmethod
    def read(cls, path: Path) -> Scores:
        """Reads the file.

        Raises:
            InvalidRequest: it cannot be read or is malformed.
        """
        content = read_object(path, _WHAT)
        try:
            widths = {
                width: {str(layer): _numbers(units) for layer, units in by_layer.items()}
                for width, by_layer in content["widths"].items()
            }
            if unknown := widths.keys() - set(WIDTHS):
                raise ValueError(f"unknown kinds {sorted(unknown)}")
            return cls(
                method=str(content["method"]),
                base_digest=str(content["base_digest"]),
                layers=_numbers(content["layers"]),
                widths=widths,
                data=content["data"],
                settings=dict(content["settings"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(f"{path} is not {_WHAT}: {error!r}", param="scores") from error


def _numbers(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or any(type(n) not in (int, float) or not math.isfinite(n) for n in value):
        raise ValueError("scores must be lists of finite numbers")
    return tuple(float(number) for number in value)
