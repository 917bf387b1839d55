"""Decoder layer in serving: decodes and packed prefill segments in one pass, caches updated in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.activations import swiglu
from kernels.attention import paged_decode, paged_prefill, write_pages
from kernels.conv1d import causal_conv_packed, causal_conv_step
from kernels.gated_delta import chunk_gated_delta, gates, recurrent_gated_delta
from kernels.quantize import multiply_fp8
from kernels.rms_norm import gated_rms_norm, l2_normalize, rms_norm
from kernels.rope import apply_rope
from services.engine.models.lora.slots import LoraLayer
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.experts import pass_experts
from services.engine.models.qwen3_5.step import Step
from services.engine.models.qwen3_5.weights import AttentionWeights, DeltaNetWeights, LayerWeights
from services.engine.models.weights.matrix import Fp8Matrix, Matrix


def decoder_layer(
    x: Tensor,
    weights: LayerWeights,
    config: Qwen3_5Config,
    step: Step,
    pools: tuple[Tensor, Tensor],
    lora: LoraLayer | None,
) -> Tensor:
    """[T, hidden] to [T, hidden].

    Args:
        pools: (keys, values) of a full-attention layer or (conv, recurrent) states of a DeltaNet layer.
        lora: the adapters of this layer, if any row has one.
    """
    normed = rms_norm(x, weights.input_norm, config.rms_norm_eps)
    mixer = weights.mixer
    projected = _linear(normed, mixer.in_proj, lora, "in", step)
    if isinstance(mixer, AttentionWeights):
        mixed = _attention(projected, mixer, config, step, *pools)
    else:
        mixed = _delta_net(projected, mixer, config, step, *pools)
    x = _add_linear(x, mixed, mixer.out_proj, lora, "out", step)
    normed = rms_norm(x, weights.post_norm, config.rms_norm_eps)
    active = swiglu(_linear(normed, weights.gate_up, lora, "gate_up", step))
    if weights.experts is not None:
        chosen, gate = pass_experts(
            normed, weights.experts, lambda rows, weight, part: F.linear(rows, weight.part(part))
        )
        x, active = x + chosen, active * gate
    return _add_linear(x, active, weights.down, lora, "down", step)


def _linear(x: Tensor, weight: Matrix, lora: LoraLayer | None, group: str, step: Step) -> Tensor:
    out = _by_role(step, x, weight, lambda rows: F.linear(x[rows], weight.dense()))
    if lora is not None:
        lora.add(group, x, out)
    return out


def _add_linear(residual: Tensor, x: Tensor, weight: Matrix, lora: LoraLayer | None, group: str, step: Step) -> Tensor:
    out = _by_role(
        step, x, weight, lambda rows: torch.addmm(residual[rows], x[rows], weight.dense().t()), residual=residual
    )
    if lora is not None:
        lora.add(group, x, out)
    return out


def _by_role(
    step: Step, x: Tensor, weight: Matrix, product: Callable[[slice], Tensor], *, residual: Tensor | None = None
) -> Tensor:
    """Product of all rows; decodes apart from prompts where those are multiplied with copies.

    Args:
        product: of some rows with the weight itself.
    """
    begin, copy = step.float8_from, weight.of_prompts()
    if begin is None:
        return product(slice(None))
    prompts = slice(begin, None)
    if copy is weight or not isinstance(copy, Fp8Matrix):
        out = product(prompts)
    else:
        out = multiply_fp8(x[prompts], copy.weight)
        out = out if residual is None else out.add_(residual[prompts])
    return torch.cat((product(slice(begin)), out)) if begin else out


def _attention(
    projected: Tensor, weights: AttentionWeights, config: Qwen3_5Config, step: Step, keys: Tensor, values: Tensor
) -> Tensor:
    count, heads, size = projected.shape[0], config.num_heads, config.query_size
    gate, queries_keys, value = torch.split(projected, [size, size + config.kv_size, config.kv_size], dim=-1)
    normed = rms_norm(queries_keys.view(count, -1, config.head_dim), weights.qk_norm, config.rms_norm_eps)
    rotated = apply_rope(normed, step.cos, step.sin)
    q = rotated[:, :heads]
    write_pages(keys, step.kv_slots, rotated[:, heads:])
    write_pages(values, step.kv_slots, value.view(count, -1, config.head_dim))
    outputs: list[Tensor] = []
    if step.decode is not None:
        part = step.decode
        outputs.append(paged_decode(q[: part.count], keys, values, part.tables, part.length, part.mask))
    if step.prefill is not None:
        for segment in step.prefill.segments:
            run = q[segment.begin : segment.end]
            outputs.append(paged_prefill(run, keys, values, segment.table, segment.start))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out.reshape(count, size) * torch.sigmoid(gate)


def _delta_net(
    projected: Tensor, weights: DeltaNetWeights, config: Qwen3_5Config, step: Step, conv: Tensor, recurrent: Tensor
) -> Tensor:
    heads = config.linear_value_heads
    qkv, z, b, a = torch.split(projected, [config.conv_dim, config.value_size, heads, heads], dim=-1)
    g, beta = gates(a, b, weights.negative_a, weights.dt_bias)
    count = step.num_decodes
    outputs: list[Tensor] = []
    if step.decode is not None:
        states = step.decode.states
        mixed, new = causal_conv_step(qkv[:count], weights.conv, states.take(conv))
        states.put(conv, new)
        state = states.take(recurrent)
        queries_keys, v = split_heads(mixed, config, step.qk_scale)
        outputs.append(recurrent_gated_delta(queries_keys, v, g[:count].exp(), beta[:count], state))
        states.put(recurrent, state)
    if step.prefill is not None:
        part = step.prefill
        mixed, new = causal_conv_packed(qkv[count:], weights.conv, part.conv, part.states.take(conv))
        part.states.put(conv, new)
        queries_keys, v = split_heads(mixed, config, step.qk_scale)
        q, k = queries_keys.unbind(1)
        out, state = chunk_gated_delta(q, k, v, g[count:], beta[count:], part.chunks, part.states.take(recurrent))
        part.states.put(recurrent, state)
        outputs.append(out)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    gate = z.view(-1, heads, config.linear_value_dim)
    return gated_rms_norm(out, gate, weights.norm, config.rms_norm_eps).view(-1, config.value_size)


def split_heads(mixed: Tensor, config: Qwen3_5Config, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution's output [T, conv_dim] as queries and keys [T, 2, key_heads, key_dim] float32, L2-normalised and
    multiplied by ``scale`` (query_key_scale()), and values [T, value_heads, value_dim]."""
    rows = mixed.shape[0]
    pairs = mixed[:, : 2 * config.key_size].view(rows, 2, config.linear_key_heads, config.linear_key_dim)
    values = mixed[:, 2 * config.key_size :].view(rows, config.linear_value_heads, config.linear_value_dim)
    return l2_normalize(pairs, scale), values
