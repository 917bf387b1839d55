"""Loader of a checkpoint directory: sharded safetensors by mmap, strict about every tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.errors import CheckpointRejected
from services.engine.models.checkpoint import MTP_PREFIX, canonical_name, shard_files
from services.engine.models.footprint import PLAIN, Storage, copies_head
from services.engine.models.qwen3_5.config import LayerType, Qwen3_5Config
from services.engine.models.qwen3_5.moe_config import DOWN, GATE_UP, SHARED, Qwen3_5MoeConfig, separate_experts
from services.engine.models.qwen3_5.weights import (
    AttentionWeights,
    DeltaNetWeights,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
    MtpWeights,
)
from services.engine.models.weights.matrix import Matrix, quantize
from services.engine.models.weights.upload import Uploader

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs
    from kernels.gpu.linear.skinny import SplitWorkspace

_FLOATS = ("F64", "F32", "BF16", "F16")


class _Shard(Protocol):
    """Methods of safetensors' open file that the loader uses."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> Any: ...
    def get_tensor(self, name: str) -> Tensor: ...


def query_row_order(config: Qwen3_5Config) -> Tensor:
    """[2 · query_size] int64: rows of q_proj ([query | gate] of each head) reordered: all gates, then all queries."""
    rows = torch.arange(2 * config.query_size).view(config.num_heads, 2, config.head_dim)
    return rows.transpose(0, 1).flip(0).reshape(-1)


def load_checkpoint(
    path: str | Path,
    config: Qwen3_5Config,
    dtype: torch.dtype,
    device: torch.device | str,
    storage: Storage = PLAIN,
    *,
    mtp: bool = False,
    kernels: KernelConfigs | None = None,
) -> ModelWeights:
    """Loads ``path/*.safetensors`` onto the device in the given dtype, without a second copy of the model in memory:
    each tensor goes from the mapped file to its place in a fused matrix, which is quantized before the next one comes.

    Args:
        mtp: load the layer that predicts the token after next, too.
        kernels: configurations of the GPU's kernels; None: those that fit the device.

    Raises:
        InvalidRequest: the shapes cannot be quantized so.
        CheckpointRejected: no weights, a corrupt file, or a tensor that is missing, unknown, twice there or misshaped.
    """
    with ExitStack() as stack:
        storage.check(config)
        shards = _open(Path(path), stack, mtp)
        return _Builder(shards, config, dtype, torch.device(device), storage, mtp, kernels).build()


class _Builder:
    """Copies tensors out of the mapped shards into their places in the fused matrices."""

    def __init__(
        self,
        shards: Mapping[str, tuple[str, _Shard]],
        config: Qwen3_5Config,
        dtype: torch.dtype,
        device: torch.device,
        storage: Storage,
        mtp: bool,
        kernels: KernelConfigs | None,
    ) -> None:
        self._mtp, self._kernels = mtp, kernels
        self._shards, self._config, self._dtype, self._device = shards, config, dtype, device
        self._storage = storage
        self._uploader = Uploader(device) if device.type == "cuda" else None
        self._workspace = _split_workspace(device) if device.type == "cuda" else None
        named = config.tensor_shapes() | (config.mtp_shapes() if mtp else {})
        self._shapes = expected = config.as_stored(named, shards)
        if mtp and not any(name.startswith(MTP_PREFIX) for name in shards):
            raise CheckpointRejected("the checkpoint has no mtp layer, which TEMPER_SPECULATIVE=mtp needs: use none")
        for name in expected:
            if name not in shards:
                raise CheckpointRejected(f"tensor {name} is missing from the checkpoint")
        allowed = expected.keys() | {"lm_head.weight"}
        for name, (full_name, _) in shards.items():
            if name not in allowed:
                raise CheckpointRejected(f"tensor {full_name} is not part of the model that config.json describes")
        for name, shape in expected.items():
            full_name, shard = shards[name]
            view = shard.get_slice(full_name)
            if tuple(view.get_shape()) != shape:
                raise CheckpointRejected(
                    f"tensor {full_name} has shape {view.get_shape()}, config.json asks for {list(shape)}"
                )
            if view.get_dtype() not in _FLOATS:
                raise CheckpointRejected(f"tensor {full_name} is {view.get_dtype()}: only plain floats are supported")

    def build(self) -> ModelWeights:
        layers = tuple(self._layer(f"layers.{index}.", kind) for index, kind in enumerate(self._config.layer_types))
        embedding = self._copy("embed_tokens.weight", self._dtype)
        mtp = self._mtp_layer() if self._mtp else None
        head = self._head(embedding)
        weights = ModelWeights(embedding, layers, self._norm("norm.weight"), head, mtp, self._kernels)
        if self._uploader is not None:
            self._uploader.finish()
            torch.cuda.empty_cache()  # what quantizing took is free for the caches
        return weights

    def _head(self, embedding: Tensor) -> Matrix:
        config, kind = self._config, "fp8" if self._storage.float8_head else "none"
        if not config.tie_word_embeddings:
            return self._matrix("lm_head.weight", kind=kind)
        if kind == "none" and copies_head(config, self._dtype, self._device):
            embedding = _in_memory_order(embedding)
        return self._stored(embedding, kind)

    def _mtp_layer(self) -> MtpWeights:
        return MtpWeights(
            embedding_norm=self._norm("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=self._norm("mtp.pre_fc_norm_hidden.weight"),
            fc=self._matrix("mtp.fc.weight"),
            layer=self._layer("mtp.layers.0.", "full_attention"),
            final_norm=self._norm("mtp.norm.weight"),
        )

    def _layer(self, prefix: str, kind: LayerType) -> LayerWeights:
        full, config = kind == "full_attention", self._config
        mlp = prefix + (SHARED if isinstance(config, Qwen3_5MoeConfig) else "mlp.")
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm.weight"),
            mixer=self._attention(prefix + "self_attn.") if full else self._delta_net(prefix + "linear_attn."),
            post_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            gate_up=self._matrix(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down=self._matrix(mlp + "down_proj.weight"),
            experts=self._experts(prefix, config) if isinstance(config, Qwen3_5MoeConfig) else None,
        )

    def _experts(self, prefix: str, config: Qwen3_5MoeConfig) -> ExpertWeights:
        def stacked(path: str) -> Matrix:
            name = prefix + path
            names = [name] if name in self._shapes else separate_experts(name, config.expert_shapes(0)[path])
            return self._matrix(*names, whole=False)

        return ExpertWeights(
            count=config.num_experts,
            per_token=config.experts_per_token,
            router=self._matrix(prefix + "mlp.gate.weight", prefix + "mlp.shared_expert_gate.weight", kind="none"),
            gate_up=stacked(GATE_UP),
            down=stacked(DOWN),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config = self._config
        norms = [
            self._norm(prefix + "q_norm.weight").expand(config.num_heads, -1),
            self._norm(prefix + "k_norm.weight").expand(config.num_kv_heads, -1),
        ]
        return AttentionWeights(
            in_proj=self._matrix(
                *(f"{prefix}{name}_proj.weight" for name in "qkv"), first_rows=query_row_order(config).to(self._device)
            ),
            qk_norm=torch.cat(norms).contiguous(),
            out_proj=self._matrix(prefix + "o_proj.weight"),
        )

    def _delta_net(self, prefix: str) -> DeltaNetWeights:
        return DeltaNetWeights(
            in_proj=self._matrix(*(f"{prefix}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))),
            conv=self._copy(prefix + "conv1d.weight", self._dtype).squeeze(1).t().contiguous(),
            negative_a=-self._copy(prefix + "A_log", torch.float32).exp(),
            dt_bias=self._copy(prefix + "dt_bias", torch.float32),
            norm=self._copy(prefix + "norm.weight", torch.float32),
            out_proj=self._matrix(prefix + "out_proj.weight"),
        )

    def _read(self, name: str) -> Tensor:
        full_name, shard = self._shards[name]
        try:
            return shard.get_tensor(full_name)
        except SafetensorError as error:
            raise CheckpointRejected(f"tensor {full_name} cannot be read: {error}") from error

    def _copy(self, name: str, dtype: torch.dtype) -> Tensor:
        # Always a copy: a tensor that aliases the mapped file would change when the file does.
        source = self._read(name)
        target = torch.empty(source.shape, dtype=dtype, device=self._device)
        self._fill(source, target)
        return target

    def _matrix(self, *names: str, first_rows: Tensor | None = None, kind: str = "", whole: bool = True) -> Matrix:
        """The named tensors one below the other; of one with more than two dimensions all rows.

        Args:
            first_rows: the order of the first one's rows.
            kind: how to store them; empty: like all layers.
            whole: products are of all rows, not of a part.
        """
        counts = [math.prod(self._shapes[name][:-1]) for name in names]
        matrix = torch.empty(sum(counts), self._shapes[names[0]][-1], dtype=self._dtype, device=self._device)
        parts = torch.split(matrix, counts)
        for place, (name, target) in enumerate(zip(names, parts, strict=True)):
            if place == 0 and first_rows is not None:
                torch.index_select(self._copy(name, self._dtype), 0, first_rows, out=target)
            else:
                self._fill(self._read(name).flatten(0, -2), target)
        kind = kind or self._storage.quantization
        return self._stored(_in_memory_order(matrix) if kind == "none" and whole else matrix, kind)

    def _stored(self, matrix: Tensor, kind: str) -> Matrix:
        invariant = self._storage.invariant
        return quantize(matrix, kind, workspace=self._workspace, invariant=invariant, kernels=self._kernels)

    def _fill(self, source: Tensor, target: Tensor) -> None:
        if self._uploader is not None:
            self._uploader.copy(source, target)
        else:
            target.copy_(source)

    def _norm(self, name: str) -> Tensor:
        return 1.0 + self._copy(name, torch.float32)


def _split_workspace(device: torch.device) -> SplitWorkspace:
    # Imported where there is a GPU: it needs Triton.
    from kernels.gpu.linear.skinny import SplitWorkspace

    return SplitWorkspace.allocate(device)


def _in_memory_order(matrix: Tensor) -> Tensor:
    """Matrix [out, in] with equal values, on the CPU with its transpose contiguous in memory: products with few rows
    are up to twice as fast there. Other devices do not care."""
    return matrix.t().contiguous().t() if matrix.device.type == "cpu" else matrix


def _open(path: Path, stack: ExitStack, mtp: bool) -> dict[str, tuple[str, _Shard]]:
    """Canonical name → (name in the file, open shard); names of the mtp layer stay as they are."""
    found: dict[str, tuple[str, _Shard]] = {}
    for file in shard_files(path):
        try:
            shard = stack.enter_context(safe_open(file, framework="pt"))
            names = list(shard.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointRejected(f"{file} is not a readable safetensors file: {error}") from error
        for full_name in names:
            name = full_name if mtp and full_name.startswith(MTP_PREFIX) else canonical_name(full_name)
            if name is None:
                continue
            if name in found:
                raise CheckpointRejected(f"tensor {full_name} is in the checkpoint twice (also as {found[name][0]})")
            found[name] = (full_name, shard)
    return found
