"""The residual stream of a step."""

from __future__ import annotations

from torch import Tensor


class Residual:
    """What the layers add to, [T, hidden], and an addend that has not been added yet.

    A product of many rows that adds to its output costs a pass over memory; the norm that reads the stream next adds in
    passing. So a product may leave its result here, and who reads takes it along.
    """

    __slots__ = ("_addend", "_x")

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._addend: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self._x.shape
        return rows, width

    def leave(self, addend: Tensor) -> None:
        """Adds [T, hidden], later; it must stay as it is until the stream is read."""
        self.settled()
        self._addend = addend

    def take(self) -> tuple[Tensor, Tensor | None]:
        """The stream without its addend, and the addend, which the caller now adds in place."""
        addend, self._addend = self._addend, None
        return self._x, addend

    def settled(self) -> Tensor:
        """The stream with everything in it."""
        x, addend = self.take()
        return x if addend is None else x.add_(addend)
