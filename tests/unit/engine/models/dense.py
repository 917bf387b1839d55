"""A dense transformer (Qwen3: grouped attention with normed queries and keys, SwiGLU) as one module: what a new
architecture consists of besides its line in services.engine.models.registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

from kernels.attention import PackedLayout, packed_causal, paged_prefill, write_pages
from kernels.rms_norm import rms_norm
from kernels.rope import Rotation, apply_rope, inverse_frequencies, rope_tables
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.errors import CheckpointRejected
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.models.checkpoint import canonical_name, shard_files
from services.engine.models.config import ModelConfig, integer, number
from services.engine.models.footprint import PLAIN, Storage
from services.engine.models.interface import CausalLM, Recompute
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.targets import Group, layer_groups
from services.engine.models.lora.trainable import LoraParams

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values), [T, heads, head_dim] each, to [T, heads, head_dim]."""
Adapt = Callable[[int, Group, Tensor, Tensor], None]
"""(layer, group, input, fused output): adds the adapters, in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(ModelConfig):
    """Shape of a Qwen3 model."""

    layers: int
    rope_theta: float
    eps: float

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DenseConfig:
        rope = data.get("rope_parameters") or data
        return cls(
            vocab_size=integer(data, "vocab_size"),
            hidden_size=integer(data, "hidden_size"),
            intermediate_size=integer(data, "intermediate_size"),
            num_heads=integer(data, "num_attention_heads"),
            num_kv_heads=integer(data, "num_key_value_heads"),
            head_dim=integer(data, "head_dim"),
            max_position_embeddings=integer(data, "max_position_embeddings"),
            tie_word_embeddings=bool(data.get("tie_word_embeddings")),
            layers=integer(data, "num_hidden_layers"),
            rope_theta=number(rope, "rope_theta"),
            eps=number(data, "rms_norm_eps"),
        )

    @property
    def num_layers(self) -> int:
        return self.layers

    def linear_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        hidden, queries, keys, width = self.hidden_size, self.query_size, self.kv_size, self.intermediate_size
        return {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        matrix = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": matrix, "norm.weight": (self.hidden_size,)}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = matrix
        for layer in range(self.layers):
            mine: dict[str, tuple[int, ...]] = {f"{path}.weight": s for path, s in self.linear_shapes(layer).items()}
            mine |= {f"{norm}_layernorm.weight": (self.hidden_size,) for norm in ("input", "post_attention")}
            mine |= {f"self_attn.{half}_norm.weight": (self.head_dim,) for half in "qk"}
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in mine.items()}
        return shapes


class Dense(CausalLM):
    """A Qwen3 model."""

    config: DenseConfig

    def __init__(self, config: DenseConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config, self._tensors = config, tensors
        self._groups = [layer_groups(config, layer) for layer in range(config.layers)]
        self._fused = {
            (layer, group.name): torch.cat([tensors[f"layers.{layer}.{t.module}.weight"] for t in group.targets])
            for layer, groups in enumerate(self._groups)
            for group in groups
        }
        self._rotation = Rotation(inverse_frequencies(config.head_dim, config.rope_theta).to(self.device))

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        storage: Storage = PLAIN,
        *,
        mtp: bool = False,
        form: DrafterForm = MTP_FORM,
        kernels: KernelConfigs | None = None,
    ) -> Dense:
        assert isinstance(config, DenseConfig)
        storage.check(config)
        found = {
            canonical_name(name): tensor.to(device, torch.float32 if "norm" in name else dtype)
            for file in shard_files(Path(path))
            for name, tensor in load_file(file).items()
        }
        expected = config.tensor_shapes()
        if mtp or {name: tuple(found[name].shape) for name in expected if name in found} != expected:
            raise CheckpointRejected(f"{path} is not what its config.json describes")
        return cls(config, {name: found[name] for name in expected})

    @property
    def dtype(self) -> torch.dtype:
        return self._tensors["embed_tokens.weight"].dtype

    @property
    def device(self) -> torch.device:
        return self._tensors["embed_tokens.weight"].device

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def head(self) -> Tensor:
        tied = self.config.tie_word_embeddings
        return self._tensors["embed_tokens.weight" if tied else "lm_head.weight"]

    @torch.inference_mode()
    def forward_all(self, batch: ForwardBatch, cache: CacheBuffers, lora: LoraSlots | None) -> tuple[Tensor, None]:
        adapters = lora.step(batch) if lora is not None and batch.has_adapters else None

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            write_pages(cache.keys[layer], batch.kv_slots, keys)
            write_pages(cache.values[layer], batch.kv_slots, values)
            outputs: list[Tensor] = []
            begin = 0
            for start, length, table in zip(batch.starts, batch.lengths, batch.block_tables, strict=True):
                blocks = table[: -(-(start + length) // cache.block_size)]
                run = queries[begin : begin + length]
                outputs.append(paged_prefill(run, cache.keys[layer], cache.values[layer], blocks, start))
                begin += length
            return torch.cat(outputs)

        def adapt(layer: int, group: Group, x: Tensor, out: Tensor) -> None:
            if adapters is not None:
                adapters.layer(layer).add(group.name, x, out)

        return self._layers(batch.token_ids, batch.positions, attend, adapt, lambda: None), None

    def forward_train(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        lora: LoraParams | None,
        *,
        recompute: Recompute,
        give_way: Callable[[], None],
        parents: Sequence[int | None] | None = None,
    ) -> Tensor:
        if parents is not None:
            raise ValueError("documents begin with an empty state here: shares_prefixes is False")
        del recompute
        layout = PackedLayout.build(lengths, self.device)
        targets = {} if lora is None else lora.targets

        def attend(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return packed_causal(queries, keys, values, layout)

        def adapt(layer: int, group: Group, x: Tensor, out: Tensor) -> None:
            for part in group.targets:
                if (target := targets.get(f"layers.{layer}.{part.module}")) is not None:
                    added = F.linear(F.linear(x, target.a), target.b) * target.scale
                    out[:, part.offset : part.offset + part.out_features] += added

        positions = torch.cat([torch.arange(length) for length in lengths])
        return self._layers(token_ids, positions, attend, adapt, give_way)

    def _layers(
        self, tokens: Tensor, positions: Tensor, attend: Attend, adapt: Adapt, give_way: Callable[[], None]
    ) -> Tensor:
        config, tensors = self.config, self._tensors
        cos, sin = rope_tables(positions, self._rotation)
        x = F.embedding(tokens, tensors["embed_tokens.weight"])
        for layer, groups in enumerate(self._groups):
            give_way()
            inside, out, gate_up, down = groups

            def linear(group: Group, value: Tensor, layer: int = layer) -> Tensor:
                result = F.linear(value, self._fused[layer, group.name])
                adapt(layer, group, value, result)
                return result

            def norm(name: str, value: Tensor, layer: int = layer) -> Tensor:
                return rms_norm(value, tensors[f"layers.{layer}.{name}.weight"], config.eps)

            fused = linear(inside, norm("input_layernorm", x)).view(len(x), -1, config.head_dim)
            queries, keys, values = fused.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
            queries = apply_rope(norm("self_attn.q_norm", queries), cos, sin)
            keys = apply_rope(norm("self_attn.k_norm", keys), cos, sin)
            x = x + linear(out, attend(layer, queries, keys, values).flatten(1))
            gate, up = linear(gate_up, norm("post_attention_layernorm", x)).chunk(2, dim=-1)
            x = x + linear(down, F.silu(gate) * up)
        return rms_norm(x, tensors["norm.weight"], config.eps)
