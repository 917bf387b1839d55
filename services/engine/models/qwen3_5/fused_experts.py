"""The MLP of a layer with experts on a CUDA device. The plain twin is `experts.pass_experts`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.gpu.experts.configs import Cut, ExpertShape, Streamed, choose, invariant, rows_that_differ
from kernels.gpu.experts.groups import FEW_ROWS
from kernels.gpu.experts.lookahead import Lookahead
from kernels.gpu.experts.mlp import ExpertMatrices, pass_experts
from kernels.gpu.experts.routing import route
from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.linear.products import normed
from kernels.gpu.linear.skinny import Norm, Scaled, parts_of, weight_kind
from kernels.gpu.lora.rows import LoraRows
from services.engine.models.qwen3_5.weights import ExpertWeights, LayerWeights
from services.engine.models.residual import Residual
from services.engine.models.weights.matrix import Matrix

_MOST_TOGETHER = 64
"""Most rows for which the shared expert is one of the chosen ones: of more, a product of its own pays."""


class Mixture:
    """Experts of all layers, launched for one forward.

    Args:
        device: decides how products are cut.
        batch_invariant: cut in one way, whatever the batch, and the shared expert always by itself.
    """

    def __init__(self, device: DeviceLimits, *, batch_invariant: bool) -> None:
        self._device = device
        self._invariant = batch_invariant

    def add_to(
        self,
        x: Residual,
        layer: LayerWeights,
        experts: ExpertWeights,
        eps: float,
        lora: Mapping[str, LoraRows],
        *,
        ahead: tuple[Norm, Matrix] | None,
        pdl: bool,
    ) -> None:
        """Adds to the stream what the layer's MLP makes of it; ``ahead`` as of Matrix.add_to()."""
        rows, norm = x.shape[0], Norm(layer.post_norm, eps)
        ready = x.ready(norm) if experts.router.few(rows) else None
        if isinstance(ready, Scaled):
            inputs: Scaled | torch.Tensor = ready
            logits = experts.router.project(x, norm=norm, pdl=pdl)
        else:
            given, addend = x.take()
            inputs = normed(given, norm, addend, pdl=pdl)
            logits = experts.router.project(inputs, pdl=pdl)
        cut = self._cut(rows, experts, logits.dtype)
        gate_up, down = experts.gate_up.weight, experts.down.weight
        if not lora and not self._invariant and rows <= _MOST_TOGETHER and _alike(layer, experts):
            both = (layer.gate_up.weight, layer.down.weight)
            matrices = ExpertMatrices(gate_up, down, both)
            lookahead = None
            if isinstance(cut, Streamed):
                behind = (*both, *(() if ahead is None else (ahead[1].weight,)))
                parts = [part for weight in behind for part in parts_of(weight)]
                lookahead = Lookahead.of(parts, cut.prefetch, self._device)
            routes = route(logits, experts.per_token, shared=True, lookahead=lookahead, pdl=pdl)
            following = ahead[0] if ahead is not None and ahead[1].few(rows) else None
            made = pass_experts(x.settled(), inputs, routes, matrices, cut, ahead=following, pdl=pdl)
            x.added(following, made)
            return
        source = x if isinstance(inputs, Scaled) else inputs
        active = layer.gate_up.project(
            source, norm=norm if source is x else None, swiglu=True, lora=lora.get("gate_up"), pdl=pdl
        )
        routes = route(logits, experts.per_token, active=active, pdl=pdl)
        pass_experts(x.settled(), inputs, routes, ExpertMatrices(gate_up, down), cut, pdl=pdl)
        x.added(None, None)
        layer.down.add_to(x, active, ahead=ahead, lora=lora.get("down"), pdl=pdl)

    def rows_that_differ(self, experts: ExpertWeights) -> tuple[int, ...]:
        """Least rows of each cut."""
        if self._invariant:
            return ()
        return (*rows_that_differ(experts.count, experts.per_token), _MOST_TOGETHER + 1, FEW_ROWS + 1)

    def _cut(self, rows: int, experts: ExpertWeights, dtype: torch.dtype) -> Cut:
        shape = ExpertShape(
            experts.count,
            experts.per_token,
            experts.gate_up.shape[1],
            experts.down.shape[1],
            weight_kind(experts.gate_up.weight),
            dtype.itemsize,
        )
        if self._invariant:
            return invariant(shape, self._device)
        return choose(rows, shape, self._device)


def _alike(layer: LayerWeights, experts: ExpertWeights) -> bool:
    """True if the shared expert is of the size and kind of the others."""
    same = layer.gate_up.shape[0] * experts.count == experts.gate_up.shape[0]
    return same and weight_kind(layer.gate_up.weight) == weight_kind(experts.gate_up.weight)
