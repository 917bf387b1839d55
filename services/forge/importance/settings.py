"""Settings of a measurement of importance, and what each method gives. Without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.errors import InvalidRequest
from services.common.jobs.kinds.forge import ImportanceMethod
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.forge.units import KINDS, OUTPUTS, WIDTHS, Kind, Width, places

if TYPE_CHECKING:
    from torch import Tensor

_MODULES: dict[Width, str] = {width: module for module, width in OUTPUTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How importance is measured.

    Raises:
        InvalidRequest: a number is not positive.
    """

    method: ImportanceMethod
    kinds: Sequence[Kind] = KINDS
    """Kinds of units that get scores."""
    tokens_per_forward: int = 4096
    sample_tokens: int = 1024
    """Tokens that leave_one_out compares losses on."""
    seed: int = 0
    """Of random scores."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_forward", "sample_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be positive", param=name)

    @property
    def widths(self) -> list[Width]:
        """Kinds of units inside layers that get scores."""
        return [width for width in WIDTHS if width in self.kinds]

    def record(self) -> dict[str, int]:
        """Settings that the method looks at."""
        if self.method == "random":
            return {"seed": self.seed}
        if self.method == "leave_one_out":
            return {"sample_tokens": self.sample_tokens}
        return {}

    def outputs(self, config: Qwen3_5Config) -> Iterator[tuple[Width, str, str]]:
        """Each kind, layer path and path of the output projection whose columns are its units, mtp layer aside."""
        for width in self.widths:
            for layer in places(config, width, mtp=False):
                yield width, layer, f"{layer}.{_MODULES[width]}"


@dataclass(frozen=True, slots=True)
class Found:
    """Scores of one method, as float64."""

    widths: Mapping[Width, Mapping[str, Tensor]]
    """Kind → layer path → [units]."""
    layers: Tensor
    """[layers]."""
