"""The differentiable forward in plain torch: the reference, and what the CPU runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.attention import BranchLayout, PackedLayout, packed_branches, packed_causal
from kernels.conv1d import ConvLayout, causal_conv_packed
from kernels.gated_delta import ChunkLayout, chunk_gated_delta, gates
from kernels.rms_norm import gated_rms_norm, rms_norm
from kernels.rope import Rotation, apply_rope, rope_tables
from services.engine.models.interface import Probe, Recompute
from services.engine.models.lora.lora_batch import LoraBatch
from services.engine.models.lora.trainable import LoraParams, TrainableTarget
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.experts import pass_experts
from services.engine.models.qwen3_5.layers import split_heads
from services.engine.models.qwen3_5.loading.loader import query_row_order
from services.engine.models.qwen3_5.step import query_key_scale
from services.engine.models.qwen3_5.weights import AttentionWeights, DeltaNetWeights, LayerWeights, ModelWeights
from services.engine.models.weights.matrix import DenseMatrix, Matrix

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim] to [T, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Level:
    """Segments of a step whose recurrences run at once: those that nothing comes before, or those behind another
    level's."""

    rows: slice
    conv: ConvLayout
    chunks: ChunkLayout
    parents: Tensor | None
    """[S] int64: segment of the level before that each goes on from; None: they begin."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Inputs that all layers of a step share; every layout keeps documents apart."""

    cos: Tensor
    sin: Tensor
    levels: tuple[Level, ...]
    attention: PackedLayout
    """Of the first level."""
    branches: BranchLayout | None
    """Of all others."""
    qk_scale: Tensor
    query_rows: Tensor
    """Order in which q_proj's rows stand in the fused projection."""

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        config: Qwen3_5Config,
        rotation: Rotation,
        device: torch.device,
        *,
        first: int = 0,
        parents: Sequence[int | None] | None = None,
    ) -> PackedStep:
        """Args: first: position of each document's first row. parents: see forward_packed."""
        tree = _Tree.of(lengths, [None] * len(lengths) if parents is None else parents)
        begins = [first + begin for begin in tree.begins]
        runs = [torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
        positions = torch.cat(runs).to(device)
        cos, sin = rope_tables(positions, rotation)
        levels = []
        for place, members in enumerate(tree.levels):
            sizes = [lengths[index] for index in members]
            above = None
            if place:
                known = {index: at for at, index in enumerate(tree.levels[place - 1])}
                above = torch.tensor([known[tree.parents[index]] for index in members], device=device)
            rows = slice(tree.rows[members[0]].start, tree.rows[members[-1]].stop)
            conv = ConvLayout.build(sizes, config.conv_kernel, device)
            levels.append(Level(rows, conv, ChunkLayout.build(sizes, device), above))
        roots = len(tree.levels[0])
        behind = range(roots, len(lengths))
        branches = BranchLayout.build([tree.rows[at] for at in behind], [tree.context(at) for at in behind], device)
        return cls(
            cos=cos,
            sin=sin,
            levels=tuple(levels),
            attention=PackedLayout.build(lengths[:roots], device),
            branches=branches if behind else None,
            qk_scale=query_key_scale(config, device),
            query_rows=query_row_order(config).to(device),
        )


@dataclass(frozen=True, slots=True)
class _Tree:
    """Segments that go on from others."""

    parents: Sequence[int]
    """-1: it begins."""
    rows: Sequence[range]
    begins: Sequence[int]
    """Tokens before each segment, up to its root."""
    levels: Sequence[Sequence[int]]
    """Segments by the number of those before them."""

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int | None]) -> _Tree:
        """Raises ValueError: the segments are not in the order of their levels."""
        ends = list(accumulate(lengths))
        above = [-1 if parent is None else parent for parent in parents]
        depths: list[int] = []
        begins: list[int] = []
        for index, parent in enumerate(above):
            if parent >= index:
                raise ValueError(f"segment {index} stands before {parent}, which it goes on from")
            depths.append(0 if parent < 0 else depths[parent] + 1)
            begins.append(0 if parent < 0 else begins[parent] + lengths[parent])
        if depths != sorted(depths):
            raise ValueError("segments must be in the order of their levels")
        rows = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        levels = [[at for at, depth in enumerate(depths) if depth == level] for level in range(depths[-1] + 1)]
        return cls(above, rows, begins, levels)

    def context(self, index: int) -> list[range]:
        """Rows before a segment, from its root on."""
        found = []
        while (index := self.parents[index]) >= 0:
            found.append(self.rows[index])
        return found[::-1]


def frozen_linear(x: Tensor, weight: Matrix) -> Tensor:
    """``x Wᵀ``, differentiable in x. A quantized matrix is decoded again for the backward: keeping what the forward
    decoded would keep the whole model in full size."""
    return frozen_part(x, weight, slice(None))


def frozen_part(x: Tensor, weight: Matrix, rows: slice) -> Tensor:
    """frozen_linear() with some rows of the weight."""
    if isinstance(weight, DenseMatrix):
        return F.linear(x, weight.part(rows))
    result: Tensor = _DecodedLinear.apply(x, weight, rows)  # type: ignore[no-untyped-call]
    return result


class _DecodedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Matrix, rows: slice) -> Tensor:
        ctx.weight, ctx.rows = weight, rows
        return F.linear(x, weight.part(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.weight.part(ctx.rows), None, None


@dataclass(frozen=True, slots=True)
class Member:
    """One adapter in a layer, and the rows that it changes."""

    rows: slice
    targets: Mapping[str, TrainableTarget]
    """By path inside the layer."""


class LayerAdapter:
    """The trainable adapters of one layer; without one, every method is the plain linear map.

    Args:
        members: together they have all rows, in order.
        probe: sees the inputs of output projections by module, and says what goes in instead.
    """

    def __init__(
        self,
        members: Sequence[Member],
        query_rows: Tensor,
        probe: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        self._members, self._query_rows, self._probe = members, query_rows, probe

    def project(self, x: Tensor, weight: Matrix, modules: Mapping[str, int]) -> list[Tensor]:
        """Outputs of one fused projection, taken apart by module.

        Args:
            x: [T, in].
            modules: path inside the layer → number of outputs, in the order of the rows of ``weight``.
        """
        parts = torch.split(frozen_linear(x, weight), list(modules.values()), dim=-1)
        return [self._adapted(part, x, module) for part, module in zip(parts, modules, strict=True)]

    def add(self, residual: Tensor, x: Tensor, weight: Matrix, module: str) -> Tensor:
        """The residual plus one linear map."""
        if self._probe is not None:
            x = self._probe(module, x)
        if isinstance(weight, DenseMatrix):
            return self._adapted(torch.addmm(residual, x, weight.dense().t()), x, module)
        return self._adapted(residual + frozen_linear(x, weight), x, module)

    def _adapted(self, out: Tensor, x: Tensor, module: str) -> Tensor:
        if not any(module in member.targets for member in self._members):
            return out
        parts = [self._of_member(one, out[one.rows], x[one.rows], module) for one in self._members]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _of_member(self, member: Member, out: Tensor, x: Tensor, module: str) -> Tensor:
        target = member.targets.get(module)
        if target is None:
            return out
        b = target.b.index_select(0, self._query_rows) if module == "self_attn.q_proj" else target.b
        down = F.linear(x, target.a.to(x.dtype)) * target.scale
        return torch.addmm(out, down, b.to(x.dtype).t())


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
    probe: Probe | None = None,
    parents: Sequence[int | None] | None = None,
) -> Tensor:
    """See Qwen3_5.forward_train, and forward_probed."""
    if sum(lengths) != token_ids.shape[0] or min(lengths, default=0) < 1:
        raise ValueError(f"lengths {list(lengths)[:8]} do not cut {token_ids.shape[0]} tokens into documents")
    step = PackedStep.build(lengths, config, rotation, token_ids.device, parents=parents)
    per_layer = _by_layer(lora, lengths, config.num_layers)
    x = F.embedding(token_ids, weights.embedding)
    for index, (layer, members) in enumerate(zip(weights.layers, per_layer, strict=True)):
        give_way()
        x = before = _yielding(x, give_way)
        adapter = LayerAdapter(members, step.query_rows, None if probe is None else _outputs(probe, index))
        kind = recompute if torch.is_grad_enabled() else "none"
        if kind == "full":
            x = _again(_layer, x, layer, config, step, adapter)
        else:
            x = _mixer(x, layer, config, step, adapter)
            x = _again(_mlp, x, layer, config, adapter) if kind == "selective" else _mlp(x, layer, config, adapter)
        if probe is not None:
            probe.layer(index, before, x)
    give_way()
    return rms_norm(_yielding(x, give_way), weights.final_norm, config.rms_norm_eps)


def _yielding(x: Tensor, give_way: Callable[[], None]) -> Tensor:
    """Tensor ``x`` itself; give_way is called when its gradient is there, i.e. between two layers of the backward."""
    if x.requires_grad:
        x.register_hook(lambda _: give_way())  # type: ignore[no-untyped-call]
    return x


def _outputs(probe: Probe, index: int) -> Callable[[str, Tensor], Tensor]:
    return lambda module, inputs: probe.output(f"layers.{index}.{module}", inputs)


def _by_layer(lora: LoraParams | LoraBatch | None, lengths: Sequence[int], count: int) -> list[list[Member]]:
    if not isinstance(lora, LoraBatch):
        return [[Member(slice(None), targets)] for targets in _targets(lora, count)]
    ends = list(accumulate(lora.rows(lengths)))
    rows = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    adapters = [_targets(adapter, count) for adapter in lora.adapters]
    return [[Member(part, one[layer]) for part, one in zip(rows, adapters, strict=True)] for layer in range(count)]


def _targets(lora: LoraParams | None, count: int) -> list[dict[str, TrainableTarget]]:
    """Targets of each layer by path inside it."""
    layers: list[dict[str, TrainableTarget]] = [{} for _ in range(count)]
    for path, target in (lora.targets if lora is not None else {}).items():
        _, index, module = path.split(".", 2)
        layers[int(index)][module] = target
    return layers


def _again(part: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The part, keeping only its arguments. Not reentrant: the first layer's input needs no gradient, yet its adapter
    does."""
    result: Tensor = checkpoint(part, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def bare_layer(
    x: Tensor,
    weights: LayerWeights,
    config: Qwen3_5Config,
    step: PackedStep,
    attend: Attend,
) -> Tensor:
    """One layer of full attention without adapters.

    Args:
        attend: queries, keys and values, rotated, to what the attention makes of them.
    """
    bare = LayerAdapter((), step.query_rows)
    normed = rms_norm(x, weights.input_norm, config.rms_norm_eps)
    if not isinstance(weights.mixer, AttentionWeights):
        raise TypeError("a layer of full attention is expected")
    mixed = _attention(normed, weights.mixer, config, step, bare, attend)
    return _mlp(bare.add(x, mixed, weights.mixer.out_proj, "self_attn.o_proj"), weights, config, bare)


def _layer(x: Tensor, weights: LayerWeights, config: Qwen3_5Config, step: PackedStep, adapter: LayerAdapter) -> Tensor:
    return _mlp(_mixer(x, weights, config, step, adapter), weights, config, adapter)


def _mixer(x: Tensor, weights: LayerWeights, config: Qwen3_5Config, step: PackedStep, adapter: LayerAdapter) -> Tensor:
    normed = rms_norm(x, weights.input_norm, config.rms_norm_eps)
    mixer = weights.mixer
    if isinstance(mixer, AttentionWeights):
        return adapter.add(x, _attention(normed, mixer, config, step, adapter), mixer.out_proj, "self_attn.o_proj")
    return adapter.add(x, _delta_net(normed, mixer, config, step, adapter), mixer.out_proj, "linear_attn.out_proj")


def _mlp(x: Tensor, weights: LayerWeights, config: Qwen3_5Config, adapter: LayerAdapter) -> Tensor:
    normed = rms_norm(x, weights.post_norm, config.rms_norm_eps)
    width = config.intermediate_size
    first, second, last = (path for group in ("gate_up", "down") for path in config.linear_groups(0)[group])
    gate_up = adapter.project(normed, weights.gate_up, {first: width, second: width})
    active = F.silu(gate_up[0]) * gate_up[1]
    if weights.experts is not None:
        chosen, gate = pass_experts(normed, weights.experts, frozen_part)
        x, active = x + chosen, active * gate
    return adapter.add(x, active, weights.down, last)


def _attention(
    x: Tensor,
    weights: AttentionWeights,
    config: Qwen3_5Config,
    step: PackedStep,
    adapter: LayerAdapter,
    attend: Attend | None = None,
) -> Tensor:
    count, heads, head_dim = x.shape[0], config.num_heads, config.head_dim
    modules = {
        "self_attn.q_proj": 2 * config.query_size,
        "self_attn.k_proj": config.kv_size,
        "self_attn.v_proj": config.kv_size,
    }
    gates_queries, key, value = adapter.project(x, weights.in_proj, modules)
    gate, query = gates_queries.chunk(2, dim=-1)
    queries_keys = torch.cat((query, key), dim=-1).view(count, -1, head_dim)
    rotated = apply_rope(rms_norm(queries_keys, weights.qk_norm, config.rms_norm_eps), step.cos, step.sin)
    parts = rotated[:, :heads], rotated[:, heads:], value.view(count, -1, head_dim)
    out = _attended(parts, step) if attend is None else attend(*parts)
    return out.reshape(count, -1) * torch.sigmoid(gate)


def _attended(parts: tuple[Tensor, Tensor, Tensor], step: PackedStep) -> Tensor:
    """[T, heads, head_dim] of queries, keys and values."""
    if step.branches is None:
        return packed_causal(*parts, step.attention)
    begin = step.levels[0].rows
    q, k, v = (part[begin] for part in parts)
    first = packed_causal(q, k, v, step.attention)
    return torch.cat((first, packed_branches(*parts, step.branches)))


def _delta_net(
    x: Tensor, weights: DeltaNetWeights, config: Qwen3_5Config, step: PackedStep, adapter: LayerAdapter
) -> Tensor:
    heads = config.linear_value_heads
    modules = {
        "linear_attn.in_proj_qkv": config.conv_dim,
        "linear_attn.in_proj_z": config.value_size,
        "linear_attn.in_proj_b": heads,
        "linear_attn.in_proj_a": heads,
    }
    qkv, z, b, a = adapter.project(x, weights.in_proj, modules)
    g, beta = gates(a, b, weights.negative_a, weights.dt_bias)
    outputs: list[Tensor] = []
    past = state = None
    for level in step.levels:
        if level.parents is not None and past is not None and state is not None:
            past, state = past.index_select(0, level.parents), state.index_select(0, level.parents)
        mixed, past = causal_conv_packed(qkv[level.rows], weights.conv, level.conv, past)
        queries_keys, v = split_heads(mixed, config, step.qk_scale)
        q, k = queries_keys.unbind(1)
        out, state = chunk_gated_delta(q, k, v, g[level.rows], beta[level.rows], level.chunks, state)
        outputs.append(out)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    gate = z.view(-1, heads, config.linear_value_dim)
    return gated_rms_norm(out, gate, weights.norm, config.rms_norm_eps).view(-1, config.value_size)
