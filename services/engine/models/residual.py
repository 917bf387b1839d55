"""The residual stream of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from kernels.gpu.linear.skinny import Norm, Scaled


class Residual:
    """Residual stream [T, hidden], and what the product that added last left for the norm that reads it next.

    A product of many rows that adds to its output costs a pass over memory; the norm adds in passing. So such a product
    may leave its result here as an addend, and who reads takes it along. A product of few rows adds, and multiplies
    with the norm's weight what it has at hand anyway: then no kernel is needed between it and the next product.
    """

    __slots__ = ("_addend", "_scaled", "_x")

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._addend: Tensor | None = None
        self._scaled: tuple[Tensor, Scaled] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self._x.shape
        return rows, width

    def leave(self, addend: Tensor) -> None:
        """Adds [T, hidden], later; it must stay as it is until the stream is read."""
        self.settled()
        self._addend, self._scaled = addend, None

    def added(self, norm: Norm | None, scaled: Scaled | None) -> None:
        """Something has been added to settled(), and this is the stream made ready for a norm, if it is for one."""
        self._scaled = None if norm is None or scaled is None else (norm.weight, scaled)

    def ready(self, norm: Norm | None) -> Tensor | Scaled:
        """The stream made ready for this norm, if it is; else as it is."""
        if norm is not None and self._scaled is not None and self._scaled[0] is norm.weight:
            return self._scaled[1]
        return self.settled()

    def take(self) -> tuple[Tensor, Tensor | None]:
        """The stream without its addend, and the addend, which the caller now adds in place."""
        addend, self._addend = self._addend, None
        return self._x, addend

    def settled(self) -> Tensor:
        """The stream with everything in it."""
        x, addend = self.take()
        return x if addend is None else x.add_(addend)
