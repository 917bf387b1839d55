"""Probes of a forward that scores come from: norms of what reaches the output projections, and gates there.

Every unit is some columns of an output projection's inputs (services.forge.units.OUTPUTS), in order of the units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from services.engine.models.interface import Probe


class ActivationProbe(Probe):
    """Sums over all tokens: squares of each column of inputs, and how far each layer turns the residual stream."""

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}
        """Path of an output projection → [in] float64."""
        self.turns: dict[int, float] = {}
        """Layer → sum of 1 − cos(before, after), the "block influence" of ShortGPT (arXiv 2403.03853)."""

    def output(self, path: str, inputs: Tensor) -> Tensor:
        """See Probe."""
        squares = inputs.double().square().sum(0)
        self.squares[path] = self.squares[path] + squares if path in self.squares else squares
        return inputs

    def layer(self, index: int, before: Tensor, after: Tensor) -> None:
        """See Probe."""
        turned = (1 - F.cosine_similarity(before.double(), after.double(), dim=-1)).sum()
        self.turns[index] = self.turns.get(index, 0.0) + float(turned)


class GradientGates(Probe):
    """A factor 1 for each input of each token. Its gradient is, to first order, what the loss loses with that input
    (Molchanov et al., arXiv 1906.10771)."""

    def __init__(self) -> None:
        self.gates: dict[str, Tensor] = {}
        """Path of an output projection → [T, in], with gradients after the backward."""

    def output(self, path: str, inputs: Tensor) -> Tensor:
        """See Probe."""
        self.gates[path] = gate = torch.ones_like(inputs, requires_grad=True)
        return inputs * gate


class LeaveOut(Probe):
    """Zeroes columns of the inputs of some tokens.

    Args:
        left_out: path of an output projection → (tokens, columns) that are zero.
    """

    def __init__(self, left_out: Mapping[str, Sequence[tuple[slice, slice]]]) -> None:
        self._left_out = left_out

    def output(self, path: str, inputs: Tensor) -> Tensor:
        """See Probe."""
        if path not in self._left_out:
            return inputs
        result = inputs.clone()
        for tokens, columns in self._left_out[path]:
            result[tokens, columns] = 0
        return result
