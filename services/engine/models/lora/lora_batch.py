"""Adapters that are trained in one packed forward, each on documents of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.engine.models.lora.trainable import LoraParams


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Adapters of a packed forward: the first documents belong to the first adapter, and so on.

    Raises:
        ValueError: none, an adapter without documents or one that is there twice, or adapters of different layouts.
    """

    adapters: tuple[LoraParams, ...]
    documents: tuple[int, ...]
    """Number of consecutive documents of each adapter."""

    def __post_init__(self) -> None:
        if len(self.adapters) != len(self.documents) or min(self.documents, default=0) < 1:
            raise ValueError(f"{len(self.adapters)} adapters with {list(self.documents)} documents")
        if len({id(adapter) for adapter in self.adapters}) < len(self.adapters):
            raise ValueError("an adapter is there twice")
        if any(adapter.layout != self.adapters[0].layout for adapter in self.adapters[1:]):
            raise ValueError("adapters of different ranks, scales or linear layers")

    def rows(self, lengths: Sequence[int]) -> list[int]:
        """Number of rows of each adapter.

        Args:
            lengths: tokens of each document.

        Raises:
            ValueError: there are more or fewer documents.
        """
        if len(lengths) != sum(self.documents):
            raise ValueError(f"{len(lengths)} documents, of which {sum(self.documents)} belong to adapters")
        found, first = [], 0
        for count in self.documents:
            found.append(sum(lengths[first : first + count]))
            first += count
        return found

    def parameters(self) -> list[Tensor]:
        """All masters, adapter by adapter."""
        return [tensor for adapter in self.adapters for tensor in adapter.parameters()]
