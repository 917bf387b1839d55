"""Choice of the products that are computed in float8 for prompts, while decodes go on in the model's dtype.

none | all | CHOICE[,CHOICE…]     CHOICE = (all | mlp | attention | linear_attention)[:FIRST-LAST]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from services.common.errors import InvalidRequest

if TYPE_CHECKING:
    from services.engine.models.config import ModelConfig

Product = Literal["mlp", "attention", "linear_attention"]
PRODUCTS: tuple[Product, ...] = ("mlp", "attention", "linear_attention")
_OF_MODULE: dict[str, Product] = {"mlp": "mlp", "self_attn": "attention", "linear_attn": "linear_attention"}
_CHOICE = re.compile(r"([a-z_]+)(?::(\d{1,4})-(\d{1,4}))?")


@dataclass(frozen=True, slots=True)
class _Choice:
    """One kind of products, or all, in all layers or in a range of them."""

    text: str
    products: frozenset[Product]
    layers: range | None

    @classmethod
    def parse(cls, text: str) -> _Choice:
        """Raises ValueError: it is none."""
        found = _CHOICE.fullmatch(text)
        if found is None or found[1] not in ("all", *PRODUCTS):
            raise ValueError(
                f"{text!r} names no products: use none, all, or some of {', '.join(PRODUCTS)} with commas between "
                "them, each with a range of layers if wished, as in mlp:0-15"
            )
        name, first, last = found.groups()
        layers = None if first is None else range(int(first), int(last) + 1)
        if layers is not None and not layers:
            raise ValueError(f"{text!r}: layer {first} is behind layer {last}; write {name}:{last}-{first}")
        return cls(text, frozenset(product for product in PRODUCTS if name in ("all", product)), layers)

    def has(self, product: Product, layer: int) -> bool:
        return product in self.products and (self.layers is None or layer in self.layers)


@dataclass(frozen=True, slots=True)
class PromptProducts:
    """Products of prompts that are computed in float8; none by default."""

    choices: tuple[_Choice, ...] = ()
    rows: int = 1
    """Fewest rows of prompts in a step that are computed so."""

    @classmethod
    def parse(cls, text: str, rows: int = 1) -> PromptProducts:
        """Products of a setting.

        Raises:
            ValueError: the text is not of the grammar above.
        """
        names = [name.strip() for name in text.split(",")]
        if names in ([""], ["none"]):
            return cls((), rows)
        return cls(tuple(map(_Choice.parse, names)), rows)

    def __str__(self) -> str:
        return ",".join(choice.text for choice in self.choices) or "none"

    def __bool__(self) -> bool:
        return bool(self.choices)

    def of_layer(self, layer: int) -> frozenset[Product]:
        """Products of a layer."""
        return frozenset(product for product in PRODUCTS if self.has(product, layer))

    def has(self, product: Product, layer: int) -> bool:
        return any(choice.has(product, layer) for choice in self.choices)

    def matrices(self, config: ModelConfig) -> Iterator[tuple[int, str, tuple[int, int]]]:
        """Layer, group of linear maps that share an input, and shape [out, in] of each matrix that has a copy."""
        for layer in range(config.num_layers):
            shapes = config.linear_shapes(layer)
            for group, modules in config.linear_groups(layer).items():
                if self.has(_OF_MODULE[modules[0].split(".")[0]], layer):
                    yield layer, group, (sum(shapes[module][0] for module in modules), shapes[modules[0]][1])

    def check(self, config: ModelConfig, multiple: int) -> None:
        """Refuses what a model has not.

        Args:
            multiple: what inputs of a matrix must be a multiple of.

        Raises:
            InvalidRequest: the model has no such layers or products, or other inputs.
        """
        for choice in self.choices:
            if choice.layers is not None and choice.layers[-1] >= config.num_layers:
                raise InvalidRequest(
                    f"TEMPER_PREFILL_FLOAT8={self}: the model has {config.num_layers} layers, 0 to "
                    f"{config.num_layers - 1}, and {choice.text} goes on behind them; end it there",
                    param="prefill_float8",
                )
            if not any(PromptProducts((choice,)).matrices(config)):
                raise InvalidRequest(
                    f"TEMPER_PREFILL_FLOAT8={self}: no layer of the model has products of {choice.text}; leave it out",
                    param="prefill_float8",
                )
        for layer, group, (_, into) in self.matrices(config):
            if into % multiple:
                raise InvalidRequest(
                    f"TEMPER_PREFILL_FLOAT8={self} needs inputs in multiples of {multiple}, those of {group} of layer "
                    f"{layer} are {into}: leave them out, or set none",
                    param="prefill_float8",
                )


NONE = PromptProducts()
