"""Weights with some of a checkpoint's tensors replaced. Differentiable in what replaces them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.weights import AttentionWeights, DeltaNetWeights, LayerWeights, ModelWeights
from services.engine.models.weights.matrix import DenseMatrix, Matrix


def replaced(config: Qwen3_5Config, weights: ModelWeights, tensors: Mapping[str, Tensor]) -> ModelWeights:
    """The weights with these tensors in the place of theirs; all others are shared.

    Args:
        tensors: by canonical name ("layers.3.mlp.down_proj.weight", "norm.weight"), as a checkpoint has them, on the
            weights' device; matrices are rounded to the model's dtype.

    Raises:
        InvalidRequest: one is no tensor of a layer's linear maps, mixer or norms, or its matrix is quantized.
        ValueError: one is misshaped.
    """
    shapes = config.tensor_shapes()
    for name, tensor in tensors.items():
        if name not in shapes or name in ("embed_tokens.weight", "lm_head.weight"):
            raise InvalidRequest(f"tensor {name} cannot be replaced: only those of layers and the last norm can")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"tensor {name} is {list(tensor.shape)} instead of {list(shapes[name])}")
    layers = tuple(
        _Layer(config, index, layer, tensors).built() if any(name.startswith(f"layers.{index}.") for name in tensors)
        else layer
        for index, layer in enumerate(weights.layers)
    )  # fmt: skip
    final = tensors.get("norm.weight")
    return replace(weights, layers=layers, final_norm=weights.final_norm if final is None else 1.0 + final.float())


class _Layer:
    """One layer with tensors replaced."""

    def __init__(self, config: Qwen3_5Config, index: int, weights: LayerWeights, tensors: Mapping[str, Tensor]) -> None:
        if weights.experts is not None:
            raise InvalidRequest("the tensors of a model with experts cannot be replaced", param="model")
        self._config, self._weights = config, weights
        self._prefix = f"layers.{index}."
        self._tensors = tensors
        self._shapes, self._groups = config.linear_shapes(index), config.linear_groups(index)

    def built(self) -> LayerWeights:
        weights = self._weights
        mixer = weights.mixer
        return replace(
            weights,
            input_norm=self._norm("input_layernorm.weight", weights.input_norm),
            mixer=self._attention(mixer) if isinstance(mixer, AttentionWeights) else self._delta_net(mixer),
            post_norm=self._norm("post_attention_layernorm.weight", weights.post_norm),
            gate_up=self._matrix("gate_up", weights.gate_up),
            down=self._matrix("down", weights.down),
        )

    def _attention(self, mixer: AttentionWeights) -> AttentionWeights:
        heads, groups = self._config.num_heads, self._config.num_kv_heads
        queries, keys = torch.split(mixer.qk_norm, [heads, groups])
        norms = []
        for name, old, count in (("q_norm", queries, heads), ("k_norm", keys, groups)):
            new = self._tensors.get(f"{self._prefix}self_attn.{name}.weight")
            norms.append(old if new is None else (1.0 + new.float()).expand(count, -1))
        return replace(
            mixer,
            in_proj=self._matrix("in", mixer.in_proj),
            qk_norm=torch.cat(norms),
            out_proj=self._matrix("out", mixer.out_proj),
        )

    def _delta_net(self, mixer: DeltaNetWeights) -> DeltaNetWeights:
        def new(name: str) -> Tensor | None:
            return self._tensors.get(f"{self._prefix}linear_attn.{name}")

        conv, decay, bias, norm = (new(name) for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"))
        return replace(
            mixer,
            in_proj=self._matrix("in", mixer.in_proj),
            conv=mixer.conv if conv is None else conv.to(mixer.conv.dtype).squeeze(1).t().contiguous(),
            negative_a=mixer.negative_a if decay is None else -decay.float().exp(),
            dt_bias=mixer.dt_bias if bias is None else bias.float(),
            norm=mixer.norm if norm is None else norm.float(),
            out_proj=self._matrix("out", mixer.out_proj),
        )

    def _norm(self, name: str, old: Tensor) -> Tensor:
        new = self._tensors.get(self._prefix + name)
        return old if new is None else 1.0 + new.float()

    def _matrix(self, group: str, old: Matrix) -> Matrix:
        """Linear maps that share their input, one below the other."""
        modules = self._groups[group]
        names = {module: f"{self._prefix}{module}.weight" for module in modules}
        if not any(name in self._tensors for name in names.values()):
            return old
        if not isinstance(old, DenseMatrix):
            raise InvalidRequest(f"tensor {names[modules[0]]} is quantized and cannot be replaced", param="model")
        pieces, begin = [], 0
        for module in modules:
            rows = self._shapes[module][0]
            new = self._tensors.get(names[module])
            if new is None:
                pieces.append(old.part(slice(begin, begin + rows)))
            else:
                order = self._config.output_order(module)
                placed = new if order is None else new.index_select(0, torch.tensor(order, device=new.device))
                pieces.append(placed.to(old.weight.dtype))
            begin += rows
        return replace(old, weight=pieces[0] if len(pieces) == 1 else torch.cat(pieces), float8=None)
