"""Probes of a forward that scores come from: norms of what reaches the output projections, and gates there.

Every unit is some columns of an output projection's inputs (services.forge.units.OUTPUTS), in order of the units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from services.engine.models.interface import Probe


class ActivationProbe(Probe):
    """Sums over all tokens: squares of each column of inputs, and how far each layer turns the residual stream.

    Args:
        give_way: called between layers, for others to compute.
    """

    def __init__(self, give_way: Callable[[], None] = lambda: None) -> None:
        self._give_way = give_way
        self.squares: dict[str, Tensor] = {}
        """Path of an output projection → [in] float64."""
        self.turns: dict[int, Tensor] = {}
        """Layer → sum of 1 − cos(before, after), the "block influence" of ShortGPT (arXiv 2403.03853), float64."""

    def output(self, path: str, inputs: Tensor) -> Tensor:
        """See Probe."""
        squares = torch.linalg.vector_norm(inputs, dim=0, dtype=torch.float64).square()  # no copy in float64
        self.squares[path] = self.squares[path] + squares if path in self.squares else squares
        return inputs

    def layer(self, index: int, before: Tensor, after: Tensor) -> None:
        """See Probe."""
        turned = (1 - F.cosine_similarity(before.double(), after.double(), dim=-1)).sum()
        self.turns[index] = self.turns[index] + turned if index in self.turns else turned
        self._give_way()


class GradientGates(Probe):
    """A factor 1 for each input of each token. Its gradient is, to first order, what the loss loses with that input
    (Molchanov et al., arXiv 1906.10771).

    Args:
        give_way: called between the forward's layers, for others to compute.
    """

    def __init__(self, give_way: Callable[[], None] = lambda: None) -> None:
        self._give_way = give_way
        self.gates: dict[str, Tensor] = {}
        """Path of an output projection → [T, in], with gradients after the backward."""

    def output(self, path: str, inputs: Tensor) -> Tensor:
        """See Probe."""
        self.gates[path] = gate = torch.ones_like(inputs, requires_grad=True)
        return inputs * gate

    def layer(self, index: int, before: Tensor, after: Tensor) -> None:
        """See Probe."""
        del index, before, after
        self._give_way()


class LeaveOut(Probe):
    """Zeroes columns of the inputs of some tokens.

    Args:
        left_out: path of an output projection → (tokens, columns) that are zero.
        give_way: called between layers, for others to compute.
    """

    def __init__(
        self, left_out: Mapping[str, Sequence[tuple[slice, slice]]], give_way: Callable[[], None] = lambda: None
    ) -> None:
        self._left_out = left_out
        self._give_way = give_way

    def output(self, path: str, inputs: Tensor) -> Tensor:
        """See Probe."""
        if path not in self._left_out:
            return inputs
        result = inputs.clone()
        for tokens, columns in self._left_out[path]:
            result[tokens, columns] = 0
        return result

    def layer(self, index: int, before: Tensor, after: Tensor) -> None:
        """See Probe."""
        del index, before, after
        self._give_way()
