"""The differentiable forward on the GPU: all layers as one autograd function whose backward is written out.

Autograd sees the masters of the adapter go in and the final hidden states come out. Between layers, in both directions,
the trainer gives way to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.rms_norm import rms_norm_backward
from services.engine.model.config import ModelConfig
from services.engine.model.lora_params import LoraParams
from services.engine.model.training.adapters import WorkingAdapter
from services.engine.model.training.layer import Kept, Layer, Recompute, Shared
from services.engine.model.weights import ModelWeights


class Trunk:
    """One forward over packed documents, and its backward.

    Args:
        lengths: tokens of each document, each at least 1.
        inverse: [rotary_dim / 2] float32, rope's inverse frequencies.
        lora: None: the base model.
        recompute: what the backward computes again.
        give_way: called between layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        inverse: Tensor,
        lengths: Sequence[int],
        lora: LoraParams | None,
        *,
        recompute: Recompute,
        give_way: Callable[[], None],
    ) -> None:
        device, dtype = weights.embedding.device, weights.embedding.dtype
        past = torch.empty(len(lengths), config.conv_kernel - 1, config.conv_dim, dtype=dtype, device=device)
        shared = Shared(config, Documents.build(lengths, device), inverse, past)
        self._weights, self._eps = weights, config.rms_norm_eps
        self._recompute, self._give_way = recompute, give_way
        self._adapter = None if lora is None else WorkingAdapter(lora, config, dtype)
        self._layers = [
            Layer(layer, shared, {} if self._adapter is None else self._adapter.layer(index))
            for index, layer in enumerate(weights.layers)
        ]

    def forward(self, token_ids: Tensor, *, keep: bool) -> tuple[Tensor, list[Kept], Tensor]:
        """Final hidden states [T, hidden], normed; what backward() reads, last layer last; and the last layer's
        output."""
        x = F.embedding(token_ids, self._weights.embedding)
        everything: list[Kept] = []
        for layer in self._layers:
            self._give_way()
            x, kept = layer.forward(x, self._recompute if keep else None)
            if kept is not None:
                everything.append(kept)
        self._give_way()
        return rms_norm(x, self._weights.final_norm, self._eps), everything, x

    def backward(self, everything: list[Kept], last: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the masters, in the order of LoraParams.parameters(); ``everything`` is used up."""
        if self._adapter is None:
            raise ValueError("without an adapter nothing is trained")
        result: Tensor | None
        result, _ = rms_norm_backward(last, self._weights.final_norm, self._eps, grad, None)
        while everything:
            self._give_way()
            if result is None:
                raise ValueError("a layer behind the first gave no gradient")
            layer = self._layers[len(everything) - 1]
            result = layer.backward(everything.pop(), result, input_grad=bool(everything))
        self._give_way()
        return tuple(self._adapter.gradients())


class _TrunkFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trunk: Trunk, token_ids: Tensor, *masters: Tensor) -> Tensor:
        del masters  # the trunk has copies; they are arguments for autograd
        hidden, everything, last = trunk.forward(token_ids, keep=True)
        ctx.trunk, ctx.everything, ctx.last = trunk, everything, last
        return hidden

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.last is None:
            raise RuntimeError("this forward has been gone through backwards already: what it kept is gone")
        gradients = ctx.trunk.backward(ctx.everything, ctx.last, grads[0].contiguous())
        ctx.last = None
        return (None, None, *gradients)


def forward_packed(
    token_ids: Tensor,
    lengths: Sequence[int],
    config: ModelConfig,
    weights: ModelWeights,
    inverse: Tensor,
    lora: LoraParams | None,
    *,
    recompute: Recompute,
    give_way: Callable[[], None],
) -> Tensor:
    """See Qwen3_5.forward_train."""
    if sum(lengths) != token_ids.shape[0] or min(lengths, default=0) < 1:
        raise ValueError(f"lengths {list(lengths)[:8]} do not cut {token_ids.shape[0]} tokens into documents")
    trunk = Trunk(config, weights, inverse, lengths, lora, recompute=recompute, give_way=give_way)
    if lora is None or not torch.is_grad_enabled():
        with torch.no_grad():
            hidden, _, _ = trunk.forward(token_ids, keep=False)
        return hidden
    result: Tensor = _TrunkFunction.apply(trunk, token_ids, *lora.parameters())  # type: ignore[no-untyped-call]
    return result
