"""Decoder layer of a training step on the GPU: forward and backward.

The forward keeps what its backward reads, as much of it as `Recompute` says; the backward computes the rest again.
Norms and activations are always computed again: the kernels of their backward need the inputs anyway and give the
results in passing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.activations import swiglu
from kernels.gpu.delta.conv1d import conv_prefill
from kernels.gpu.delta.gated_norm import gated_norm
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.tiles import Tiles
from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.train.activations import swiglu_backward
from kernels.gpu.train.attention import AttentionShape, attention_forward
from kernels.gpu.train.attention_backward import attention_backward, gate_backward
from kernels.gpu.train.conv1d import conv_backward
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.gated_delta import DeltaTrace, gated_delta_forward
from kernels.gpu.train.gated_delta_backward import scan_backward
from kernels.gpu.train.gated_delta_gradients import gated_delta_gradients
from kernels.gpu.train.gated_norm import gated_norm_backward
from kernels.gpu.train.qk_rope import qk_norm_rope, qk_norm_rope_backward
from kernels.gpu.train.rms_norm import rms_norm_backward
from kernels.rope import Rotation
from services.engine.models.interface import Recompute
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.training.adapters import GroupProducts
from services.engine.models.qwen3_5.training.experts import ExpertsInside, TrainedThrough, gate
from services.engine.models.qwen3_5.training.frozen import FrozenLinear, FrozenLinears
from services.engine.models.qwen3_5.weights import AttentionWeights, DeltaNetWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Shared:
    """Inputs that all layers of a step share."""

    config: Qwen3_5Config
    documents: Documents
    rotation: Rotation
    """Of queries and keys."""
    device: DeviceLimits
    """Limits that kernels are cut up for."""
    past: Tensor
    """[documents, kernel - 1, conv_dim]: scratch for the convolution's states: what comes before documents that go on
    from others."""

    @property
    def delta(self) -> DeltaShape:
        config = self.config
        return DeltaShape(
            config.linear_key_heads, config.linear_value_heads, config.linear_key_dim, config.linear_value_dim
        )

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim)


@dataclass(slots=True)
class DeltaInside:
    """A DeltaNet mixer between its two projections."""

    mixed: Tensor
    """[T, conv_dim]: the convolution's output."""
    out: Tensor
    """[T, value_size]: the recurrence's output, before the gated norm."""
    tiles: Tiles | None
    """None: the backward has read them."""
    trace: DeltaTrace


@dataclass(slots=True)
class AttentionInside:
    """An attention mixer between its two projections."""

    attended: Tensor
    """[T, query_size], before the gate."""
    normalizer: Tensor
    """[heads, T]: log₂ of the softmax' denominators."""


@dataclass(slots=True)
class Kept:
    """Activations that a layer's backward reads; None: they are computed again."""

    x: Tensor
    """[T, hidden]: the layer's input."""
    projected: Tensor | None = None
    """[T, width]: the mixer's first projection, adapters included."""
    inside: DeltaInside | AttentionInside | None = None
    middle: Tensor | None = None
    """[T, hidden]: the residual stream between mixer and MLP."""
    gate_up: Tensor | None = None
    """[T, 2 · intermediate]: adapters included."""
    experts: ExpertsInside | None = None


class Layer:
    """A layer's weights and adapter for one training step.

    Args:
        adapter: the layer's groups that have an adapter.
        linears: products with its matrices; None: in the model's dtype.
        observe: given an output projection's group ("out", "down") and its inputs [T, in], returns what goes in in
            their place; for forwards without a backward.
    """

    def __init__(
        self,
        weights: LayerWeights,
        shared: Shared,
        adapter: Mapping[str, GroupProducts],
        linears: FrozenLinears | None = None,
        observe: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        self._weights, self._shared, self._adapter = weights, shared, adapter
        self._linears = linears or FrozenLinears.dense(weights)
        self._observe = observe
        self._eps = shared.config.rms_norm_eps
        self._experts = None if weights.experts is None else TrainedThrough(weights.experts, shared.device)

    # Each of these is short enough for a step of the engine to wait for.

    def mixer(self, x: Tensor, recompute: Recompute | None) -> tuple[Tensor, Kept]:
        """[T, hidden], the layer's input, to the residual stream between mixer and MLP, and what is kept of it.

        Args:
            recompute: None: there will be no backward.
        """
        kept = Kept(x)
        projected = self._project(x)
        mixed, inside = self._mix(projected)
        middle = self._add(x, self._observed("out", mixed), self._linears.mixer_out, "out")
        if recompute in ("none", "selective"):
            kept.projected, kept.middle = projected, middle
            # Attention costs most to compute again and keeps least.
            if recompute == "none" or isinstance(inside, AttentionInside):
                kept.inside = inside
        return middle, kept

    def mlp(self, middle: Tensor, kept: Kept, recompute: Recompute | None) -> Tensor:
        """The mixer's part of the layer's output, [T, hidden]."""
        normed = rms_norm(middle, self._weights.post_norm, self._eps)
        gate_up = self._linear(normed, self._linears.gate_up, "gate_up")
        if recompute == "none":
            kept.gate_up = gate_up
        active = swiglu(gate_up)
        if self._experts is None:
            return self._add(middle, self._observed("down", active), self._linears.down, "down")
        inside = self._experts.inside(normed)
        out = self._add(middle, self._observed("down", active.mul_(gate(inside))), self._linears.down, "down")
        self._experts.add_to(out, normed, inside)
        if recompute == "none":
            kept.experts = inside
        return out

    def again(self, kept: Kept) -> None:
        """Computes again what of the mixer was not kept."""
        if kept.projected is None:
            kept.projected = self._project(kept.x)
        if kept.middle is None:
            mixed, kept.inside = self._mix(kept.projected)
            kept.middle = self._add(kept.x, mixed, self._linears.mixer_out, "out")
        elif kept.inside is None and isinstance(self._weights.mixer, DeltaNetWeights):
            kept.inside = self._delta(kept.projected, self._weights.mixer)

    def mlp_backward(self, kept: Kept, grad: Tensor) -> Tensor:
        """Gradient in the residual stream between mixer and MLP; those of the adapter are added to.

        Args:
            kept: after again(); used up as far as the MLP goes.
            grad: [T, hidden], in the layer's output.
        """
        if kept.middle is None:
            raise ValueError("nothing of the mixer was kept or computed again")
        gate_up = self._gate_up(kept.middle) if kept.gate_up is None else kept.gate_up
        kept.gate_up = None
        down, down_grad = self._back(grad, self._linears.down, "down")
        through = inside = None
        if self._experts is not None:
            normed = rms_norm(kept.middle, self._weights.post_norm, self._eps)
            inside = self._experts.inside(normed) if kept.experts is None else kept.experts
            kept.experts = None
            through = self._experts.backward(normed, inside, grad, swiglu(gate_up), down)
            del normed
        gate_up_grad, active = swiglu_backward(gate_up, down, in_place=True)
        if down_grad is not None and inside is not None:
            active.mul_(gate(inside))
        self._gradients("down", active, down_grad, grad)
        del active, down, inside
        normed_grad, reduced_grad = self._back(gate_up_grad, self._linears.gate_up, "gate_up")
        if through is not None:
            normed_grad += through
        result, normed = rms_norm_backward(kept.middle, self._weights.post_norm, self._eps, normed_grad, grad)
        kept.middle = None
        self._gradients("gate_up", normed, reduced_grad, gate_up_grad)
        return result

    def mixer_backward(self, kept: Kept, grad: Tensor, *, input_grad: bool) -> Tensor | None:
        """Gradient in the layer's input, of what mlp_backward() gave. ``kept`` is used up.

        Args:
            input_grad: False: nobody needs the gradient in the input.
        """
        mixed_grad, reduced_grad = self._back(grad, self._linears.mixer_out, "out")
        mixed, projected_grad = self._inside_backward(kept, mixed_grad)
        self._gradients("out", mixed, reduced_grad, grad)
        del mixed, mixed_grad
        if not input_grad:
            if (adapter := self._adapter.get("in")) is not None:
                normed = rms_norm(kept.x, self._weights.input_norm, self._eps)
                self._gradients("in", normed, adapter.back(projected_grad), projected_grad)
            return None
        normed_grad, reduced_grad = self._back(projected_grad, self._linears.mixer_in, "in")
        result, normed = rms_norm_backward(kept.x, self._weights.input_norm, self._eps, normed_grad, grad)
        self._gradients("in", normed, reduced_grad, projected_grad)
        return result

    # Forward.

    def _observed(self, group: str, x: Tensor) -> Tensor:
        return x if self._observe is None else self._observe(group, x)

    def _project(self, x: Tensor) -> Tensor:
        normed = rms_norm(x, self._weights.input_norm, self._eps)
        return self._linear(normed, self._linears.mixer_in, "in")

    def _gate_up(self, middle: Tensor) -> Tensor:
        return self._linear(rms_norm(middle, self._weights.post_norm, self._eps), self._linears.gate_up, "gate_up")

    def _linear(self, x: Tensor, linear: FrozenLinear, group: str) -> Tensor:
        if (adapter := self._adapter.get(group)) is not None:
            return linear.product(x, adapter.expand(adapter.reduce(x)), in_place=True)
        return linear.product(x)

    def _add(self, residual: Tensor, x: Tensor, linear: FrozenLinear, group: str) -> Tensor:
        if group in self._adapter:
            return self._linear(x, linear, group).add_(residual)
        return linear.product(x, residual)

    def _mix(self, projected: Tensor) -> tuple[Tensor, DeltaInside | AttentionInside]:
        if isinstance(self._weights.mixer, AttentionWeights):
            rotated = self._rotate(projected, self._weights.mixer)
            attended, gated, normalizer = attention_forward(
                rotated, projected, self._shared.attention, self._shared.documents, device=self._shared.device
            )
            return gated, AttentionInside(attended, normalizer)
        inside = self._delta(projected, self._weights.mixer)
        result = torch.empty_like(inside.out)
        gate = self._delta_gate(projected)
        segments = self._shared.documents.segments
        gated_norm(inside.out, gate, self._weights.mixer.norm, self._eps, segments, out=result)
        return result, inside

    def _rotate(self, projected: Tensor, weights: AttentionWeights) -> Tensor:
        shared = self._shared
        return qk_norm_rope(
            projected,
            weights.qk_norm,
            self._eps,
            shared.rotation,
            shared.documents.positions,
            offset=shared.config.query_size,
        )

    def _delta(self, projected: Tensor, weights: DeltaNetWeights) -> DeltaInside:
        shared = self._shared
        mixed = torch.empty(len(projected), shared.config.conv_dim, dtype=projected.dtype, device=projected.device)
        self._past(projected)
        conv_prefill(projected, weights.conv, shared.past, shared.documents.segments, out=mixed)
        out, tiles, trace = gated_delta_forward(
            mixed,
            projected,
            weights.negative_a,
            weights.dt_bias,
            shared.delta,
            shared.documents,
            device=shared.device,
        )
        return DeltaInside(mixed, out, tiles, trace)

    def _past(self, projected: Tensor) -> Tensor | None:
        """The convolution's inputs before each document, where some go on from others."""
        tree, past = self._shared.documents.tree, self._shared.past
        return None if tree is None else tree.past(projected[:, : past.shape[2]], out=past)

    def _delta_gate(self, projected: Tensor) -> Tensor:
        """z, a view of the mixer's projection or of its gradient."""
        config = self._shared.config
        return projected[:, config.conv_dim : config.conv_dim + config.value_size]

    # Backward.

    def _back(self, grad: Tensor, linear: FrozenLinear, group: str) -> tuple[Tensor, Tensor | None]:
        """Gradient in a linear layer's input, and in the adapter's low-rank rows if there is one."""
        if (adapter := self._adapter.get(group)) is None:
            return linear.input_grad(grad), None
        reduced = adapter.back(grad)
        return linear.input_grad(grad, adapter.input_grad(reduced)), reduced

    def _gradients(self, group: str, x: Tensor, reduced_grad: Tensor | None, grad: Tensor) -> None:
        if reduced_grad is not None:
            adapter = self._adapter[group]
            adapter.gradients(x, adapter.reduce(x), reduced_grad, grad)

    def _inside_backward(self, kept: Kept, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the output projection, and the gradient in the first projection."""
        if kept.projected is None:
            raise ValueError("nothing of the mixer was kept or computed again")
        projected, inside = kept.projected, kept.inside
        kept.projected = kept.inside = None
        projected_grad = torch.empty_like(projected)
        if isinstance(inside, AttentionInside) and isinstance(self._weights.mixer, AttentionWeights):
            mixed = self._attention_backward(projected, inside, grad, projected_grad, self._weights.mixer)
        elif isinstance(inside, DeltaInside) and isinstance(self._weights.mixer, DeltaNetWeights):
            mixed = self._delta_backward(projected, inside, grad, projected_grad, self._weights.mixer)
        else:
            raise ValueError(f"a mixer of {type(self._weights.mixer).__name__} kept {type(inside).__name__}")
        return mixed, projected_grad

    def _attention_backward(
        self,
        projected: Tensor,
        inside: AttentionInside,
        grad: Tensor,
        projected_grad: Tensor,
        weights: AttentionWeights,
    ) -> Tensor:
        shared, shape = self._shared, self._shared.attention
        rotated = self._rotate(projected, weights)
        do, mixed, products = gate_backward(inside.attended, projected, grad, shape, projected_grad=projected_grad)
        rotated_grad = attention_backward(
            rotated,
            projected,
            do,
            inside.normalizer,
            products,
            shape,
            shared.documents,
            projected_grad=projected_grad,
            device=shared.device,
        )
        qk_norm_rope_backward(
            projected,
            weights.qk_norm,
            self._eps,
            shared.rotation,
            shared.documents.positions,
            rotated_grad,
            offset=shape.query_size,
            out=projected_grad,
        )
        return mixed

    def _delta_backward(
        self, projected: Tensor, inside: DeltaInside, grad: Tensor, projected_grad: Tensor, weights: DeltaNetWeights
    ) -> Tensor:
        shared, documents = self._shared, self._shared.documents
        do, result = gated_norm_backward(
            inside.out,
            self._delta_gate(projected),
            weights.norm,
            self._eps,
            grad,
            dgate=self._delta_gate(projected_grad),
            in_place=True,
        )
        if inside.tiles is None:
            raise ValueError("this forward has been gone through backwards already")
        scans = scan_backward(inside.mixed, projected, inside.tiles, do, shared.delta, documents, device=shared.device)
        inside.tiles = None  # here a step needs most memory
        mixed_grad = gated_delta_gradients(
            inside.mixed,
            projected,
            weights.negative_a,
            weights.dt_bias,
            inside.trace,
            do,
            *scans,
            shared.delta,
            documents,
            projected_grad=projected_grad,
        )
        past = self._past(projected)
        conv_backward(projected, weights.conv, mixed_grad, documents, out=projected_grad, past=past)
        return result
