"""Form of a drafter: which layers it has and how it proposes tokens, as its drafter.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from services.common.errors import AdapterRejected

DrafterKind: TypeAlias = Literal["mtp", "block"]
MOST_CHAINED = 4
"""Most tokens that the mtp layer proposes, one after the other."""
MOST_BLOCK = 16
"""Most tokens that a block drafter proposes at once."""
MOST_LAYERS = 4
_READS = "last"
"""Hidden states that drafters are made of: those behind the model's last layer."""


@dataclass(frozen=True, slots=True)
class DrafterForm:
    """Form of a drafter.

    Raises:
        ValueError: a number is out of range, or the mtp layer has several layers.
    """

    block: int = 0
    """Tokens that it proposes at once; 0: the mtp layer proposes one after the other, fed its own output."""
    layers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.block <= MOST_BLOCK:
            raise ValueError(f"block is {self.block}: a block drafter proposes 1 to {MOST_BLOCK} tokens at once")
        if not 1 <= self.layers <= (MOST_LAYERS if self.block else 1):
            raise ValueError(
                f"layers is {self.layers}: the mtp layer is one, and a block drafter has 1 to {MOST_LAYERS}"
            )

    def __str__(self) -> str:
        if self.block == 0:
            return "an mtp layer"
        return f"a block drafter of {self.block} tokens in {self.layers} layer{'s' if self.layers > 1 else ''}"

    @property
    def most_tokens(self) -> int:
        """Most tokens that it proposes behind a step."""
        return self.block or MOST_CHAINED

    def stated(self) -> dict[str, Any]:
        """The fields of drafter.json."""
        if self.block == 0:
            return {"kind": "mtp"}
        return {"kind": "block", "block": self.block, "layers": self.layers, "reads": _READS}

    @classmethod
    def read(cls, stated: Mapping[str, Any], name: str) -> DrafterForm:
        """The form that a drafter.json states; one without a kind is of the mtp layer.

        Args:
            name: of the file, for messages.

        Raises:
            AdapterRejected: a field is missing, unknown to the kind or out of range.
        """
        kind = stated.get("kind", "mtp")
        if kind == "mtp":
            if given := sorted({"block", "layers", "reads"} & stated.keys()):
                raise AdapterRejected(f"{name}: {', '.join(given)} are of kind block, and kind is mtp")
            return cls()
        if kind != "block":
            raise AdapterRejected(f"{name}: kind is {kind!r}, and a drafter is one of mtp and block")
        numbers = stated.get("block"), stated.get("layers")
        if not all(type(number) is int and number > 0 for number in numbers):
            raise AdapterRejected(f"{name}: block and layers must be numbers from 1 on, got {numbers}")
        if stated.get("reads") != _READS:
            raise AdapterRejected(
                f"{name}: reads is {stated.get('reads')!r}, and drafters read the hidden states behind the last layer: "
                f"{_READS!r}"
            )
        try:
            return cls(int(numbers[0] or 0), int(numbers[1] or 0))
        except ValueError as error:
            raise AdapterRejected(f"{name}: {error}") from error


MTP_FORM = DrafterForm()
