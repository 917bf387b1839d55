"""The differentiable forward on the GPU: all layers as one autograd function whose backward is written out.

Autograd sees final hidden states come out that depend on the adapter. The gradients of its masters do not go through
autograd: each product adds to them where they lie (as Megatron-LM's fused accumulation does). Between layers, in both
directions, the trainer gives way to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.gpu.configs import KernelConfigs
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.rms_norm import rms_norm_backward
from kernels.gpu.train.tree import depth_first
from kernels.rope import Rotation
from services.engine.models.interface import Probe, Recompute
from services.engine.models.lora.lora_batch import LoraBatch
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.training.adapter_batch import WorkingBatch
from services.engine.models.qwen3_5.training.adapters import WorkingAdapter, WorkingFactors
from services.engine.models.qwen3_5.training.frozen import FrozenLinears
from services.engine.models.qwen3_5.training.layer import Kept, Layer, Shared
from services.engine.models.qwen3_5.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Order:
    """Two orders of the same rows: that of a packed batch, and that of its documents in the layers."""

    there: Tensor
    """[T] int64: row of the batch of each row in the layers."""
    here: Tensor
    """[T] int64: row in the layers of each of the batch."""


class Trunk:
    """The layers for one set of documents, in both directions.

    Args:
        rotation: of queries and keys.
        adapter: None: the base model.
        linears: products with each layer's matrices; None: in the model's dtype.
        probe: sees, and may change, what goes into the output projections; for forwards without a backward.
        order: where the rows of the documents stand in what goes in and comes out; None: in the same places.
    """

    def __init__(
        self,
        config: Qwen3_5Config,
        weights: ModelWeights,
        rotation: Rotation,
        documents: Documents,
        adapter: WorkingFactors | None,
        probe: Probe | None = None,
        *,
        linears: Sequence[FrozenLinears] | None = None,
        order: Order | None = None,
    ) -> None:
        device, dtype = weights.embedding.device, weights.embedding.dtype
        past = torch.empty(documents.count, config.conv_kernel - 1, config.conv_dim, dtype=dtype, device=device)
        kernels = weights.kernels or KernelConfigs.on(device)
        shared = Shared(config, documents, rotation, kernels.device, past)
        self._weights, self._eps, self._order = weights, config.rms_norm_eps, order
        self.layers = [
            Layer(
                layer,
                shared,
                {} if adapter is None else adapter.layer(index),
                None if linears is None else linears[index],
                None if probe is None else _outputs(probe, index, config),
            )
            for index, layer in enumerate(weights.layers)
        ]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to [T, hidden]."""
        if self._order is not None:
            token_ids = token_ids.index_select(0, self._order.there)
        return F.embedding(token_ids, self._weights.embedding)

    def finish(self, x: Tensor) -> Tensor:
        """The last layer's output to the final hidden states, normed."""
        hidden = rms_norm(x, self._weights.final_norm, self._eps)
        return hidden if self._order is None else hidden.index_select(0, self._order.here)

    def finish_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Gradient in the last layer's output ``x``."""
        if self._order is not None:
            grad = grad.index_select(0, self._order.there)
        return rms_norm_backward(x, self._weights.final_norm, self._eps, grad, None)[0]


def _outputs(probe: Probe, index: int, config: Qwen3_5Config) -> Callable[[str, Tensor], Tensor]:
    groups = config.linear_groups(index)
    return lambda group, inputs: probe.output(f"layers.{index}.{groups[group][0]}", inputs)


class Step(Protocol):
    """A forward that keeps what its backward needs."""

    def forward(self) -> Tensor:
        """Final hidden states [T, hidden], normed."""
        ...

    def backward(self, grad: Tensor) -> None:
        """Adds to the gradients of the adapter's masters, once."""
        ...


class EagerStep:
    """Launches kernel by kernel. Implements Step.

    Args:
        recompute: what the backward computes again; None: there will be none.
        give_way: called between the halves of layers.
    """

    def __init__(
        self, trunk: Trunk, token_ids: Tensor, recompute: Recompute | None, give_way: Callable[[], None]
    ) -> None:
        self._trunk, self._token_ids = trunk, token_ids
        self._recompute, self._give_way = recompute, give_way
        self._everything: list[Kept] = []
        self._last: Tensor | None = None

    def forward(self) -> Tensor:
        """See Step."""
        x = self._trunk.embed(self._token_ids)
        for layer in self._trunk.layers:
            self._give_way()
            middle, kept = layer.mixer(x, self._recompute)
            self._give_way()
            x = layer.mlp(middle, kept, self._recompute)
            del middle
            if self._recompute is not None:
                self._everything.append(kept)
        self._give_way()
        if self._recompute is not None:
            self._last = x
        return self._trunk.finish(x)

    def backward(self, grad: Tensor) -> None:
        """See Step.

        Raises:
            RuntimeError: it has been gone through backwards already.
        """
        if self._last is None:
            raise RuntimeError("this forward has been gone through backwards already: what it kept is gone")
        result: Tensor | None = self._trunk.finish_backward(self._last, grad)
        self._last = None
        while self._everything:
            layer, kept = self._trunk.layers[len(self._everything) - 1], self._everything.pop()
            if self._recompute != "none":
                self._give_way()
                layer.again(kept)
            self._give_way()
            if result is None:
                raise ValueError("a layer behind the first gave no gradient")
            result = layer.mlp_backward(kept, result)
            self._give_way()
            result = layer.mixer_backward(kept, result, input_grad=bool(self._everything))


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, master: Tensor) -> Tensor:
        del master  # an argument for autograd, which would otherwise see nothing to differentiate
        ctx.step = step
        return step.forward()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.step.backward(grads[0].contiguous())
        return None, None


def differentiable(step: Step, lora: LoraParams | LoraBatch) -> Tensor:
    """The step's hidden states, for autograd to come back with their gradient."""
    result: Tensor = _StepFunction.apply(step, lora.parameters()[0])  # type: ignore[no-untyped-call]
    return result


def forward_packed(
    token_ids: Tensor,
    lengths: Sequence[int],
    config: Qwen3_5Config,
    weights: ModelWeights,
    rotation: Rotation,
    lora: LoraParams | LoraBatch | None,
    *,
    recompute: Recompute,
    give_way: Callable[[], None],
    parents: Sequence[int | None] | None = None,
    linears: Sequence[FrozenLinears] | None = None,
) -> Tensor:
    """See Qwen3_5.forward_train.

    Args:
        linears: see Trunk.

    Raises:
        ValueError: as there; or documents of several adapters go on from each other.
    """
    order = None
    if parents is None:
        documents = _documents(token_ids, lengths)
    elif isinstance(lora, LoraBatch):
        raise ValueError("parents: documents of several adapters have nothing in common")
    else:
        documents, order = _branching(token_ids, lengths, parents, past=config.conv_kernel - 1)
    adapter: WorkingFactors | None = None
    if isinstance(lora, LoraBatch):
        adapter = WorkingBatch(lora, lora.rows(lengths), config, weights.embedding.dtype)
    elif lora is not None:
        adapter = WorkingAdapter(lora, config, weights.embedding.dtype)
    trunk = Trunk(config, weights, rotation, documents, adapter, linears=linears, order=order)
    if lora is None or not torch.is_grad_enabled():
        with torch.no_grad():
            return EagerStep(trunk, token_ids, None, give_way).forward()
    return differentiable(EagerStep(trunk, token_ids, recompute, give_way), lora)


def forward_probed(
    token_ids: Tensor,
    lengths: Sequence[int],
    config: Qwen3_5Config,
    weights: ModelWeights,
    rotation: Rotation,
    probe: Probe,
    give_way: Callable[[], None],
) -> Tensor:
    """See Qwen3_5.forward_probed; without gradients."""
    with torch.no_grad():
        trunk = Trunk(config, weights, rotation, _documents(token_ids, lengths), None, probe)
        x = trunk.embed(token_ids)
        for index, layer in enumerate(trunk.layers):
            give_way()
            middle, kept = layer.mixer(x, None)
            give_way()
            after = layer.mlp(middle, kept, None)
            probe.layer(index, x, after)
            x = after
        give_way()
        return trunk.finish(x)


def _documents(token_ids: Tensor, lengths: Sequence[int]) -> Documents:
    """Raises ValueError if the lengths do not add up to T."""
    _check(token_ids, lengths)
    return Documents.build(lengths, token_ids.device)


def _branching(
    token_ids: Tensor, lengths: Sequence[int], parents: Sequence[int | None], *, past: int
) -> tuple[Documents, Order]:
    """Documents in depth-first order, and where their rows are. Raises ValueError as forward_packed()."""
    _check(token_ids, lengths)
    order = depth_first(parents)
    place = {index: at for at, index in enumerate(order)}
    above = [None if (parent := parents[index]) is None else place[parent] for index in order]
    documents = Documents.branching([lengths[index] for index in order], above, token_ids.device, past=past)
    begins = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    there = torch.cat([torch.arange(begins[index], begins[index] + lengths[index]) for index in order])
    return documents, Order(there.to(token_ids.device), torch.argsort(there).to(token_ids.device))


def _check(token_ids: Tensor, lengths: Sequence[int]) -> None:
    if sum(lengths) != token_ids.shape[0] or min(lengths, default=0) < 1:
        raise ValueError(f"lengths {list(lengths)[:8]} do not cut {token_ids.shape[0]} tokens into documents")
