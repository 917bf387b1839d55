"""Loader of a checkpoint directory: sharded safetensors by mmap, strict about every tensor."""

from __future__ import annotations

import math
from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.quantize import multiply_groups
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.engine.models.config import MTP_LAYER
from services.engine.models.footprint import PLAIN, Storage, copies_head
from services.engine.models.qwen3_5.config import LayerType, Qwen3_5Config
from services.engine.models.qwen3_5.loading.tensors import CheckpointTensors
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
from services.engine.models.weights.prompts import Product
from services.engine.models.weights.upload import Uploader

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs
    from kernels.gpu.linear.skinny import SplitWorkspace


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
    form: DrafterForm = MTP_FORM,
    kernels: KernelConfigs | None = None,
) -> ModelWeights:
    """Loads ``path/*.safetensors`` onto the device in the given dtype, without a second copy of the model in memory:
    each tensor goes from the mapped file to its place in a fused matrix, which is quantized before the next one comes.

    Args:
        mtp: load the layer that predicts the token after next, too.
        form: of the drafter that will be written over it. Until then each of its layers is that one.
        kernels: configurations of the GPU's kernels; None: those that fit the device.

    Raises:
        InvalidRequest: the shapes cannot be quantized so.
        CheckpointRejected: no weights, a corrupt file, or a tensor that is missing, unknown, twice there or misshaped.
    """
    with ExitStack() as stack:
        storage.check(config)
        named = config.tensor_shapes() | (config.mtp_shapes() if mtp else {})
        tensors = CheckpointTensors(Path(path), stack, config, named, mtp=mtp)
        return _Builder(tensors, config, dtype, torch.device(device), storage, form if mtp else None, kernels).build()


class _Builder:
    """Copies tensors out of the mapped shards into their places in the fused matrices."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        config: Qwen3_5Config,
        dtype: torch.dtype,
        device: torch.device,
        storage: Storage,
        form: DrafterForm | None,
        kernels: KernelConfigs | None,
    ) -> None:
        self._form, self._kernels = form, kernels
        self._tensors, self._config, self._dtype, self._device = tensors, config, dtype, device
        self._storage = storage
        self._uploader = Uploader(device) if device.type == "cuda" else None
        self._workspace = _split_workspace(device) if device.type == "cuda" else None

    def build(self) -> ModelWeights:
        prompts = self._storage.prompts
        layers = tuple(
            self._layer(f"layers.{index}.", kind, prompts.of_layer(index))
            for index, kind in enumerate(self._config.layer_types)
        )
        embedding = self._copy("embed_tokens.weight", self._dtype)
        mtp = None if self._form is None else self._mtp_layer(embedding, self._form)
        head = self._head(embedding)
        weights = ModelWeights(
            embedding,
            layers,
            self._norm("norm.weight"),
            head,
            mtp,
            self._kernels,
            prompt_rows=prompts.rows if prompts else 0,
        )
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

    def _mtp_layer(self, embedding: Tensor, form: DrafterForm) -> MtpWeights:
        config, head = self._config, None
        if self._storage.has_draft_head(config, self._dtype.itemsize):
            tied = config.tie_word_embeddings
            head = self._stored(embedding, "int4") if tied else self._matrix("lm_head.weight", kind="int4")
        return MtpWeights(
            embedding_norm=self._norm("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=self._norm("mtp.pre_fc_norm_hidden.weight"),
            fc=self._matrix("mtp.fc.weight"),
            layers=tuple(self._layer(MTP_LAYER, "full_attention") for _ in range(form.layers)),
            final_norm=self._norm("mtp.norm.weight"),
            head=head,
            places=torch.zeros(form.block - 1, config.hidden_size, dtype=self._dtype, device=self._device)
            if form.block
            else None,
        )

    def _layer(self, prefix: str, kind: LayerType, copied: Set[Product] = frozenset()) -> LayerWeights:
        """A layer, whose ``copied`` products have a copy for prompts."""
        full, config = kind == "full_attention", self._config
        mlp = prefix + (SHARED if isinstance(config, Qwen3_5MoeConfig) else "mlp.")
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm.weight"),
            mixer=self._attention(prefix + "self_attn.", copied="attention" in copied)
            if full
            else self._delta_net(prefix + "linear_attn.", copied="linear_attention" in copied),
            post_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            gate_up=self._matrix(mlp + "gate_proj.weight", mlp + "up_proj.weight", copied="mlp" in copied),
            down=self._matrix(mlp + "down_proj.weight", copied="mlp" in copied),
            experts=self._experts(prefix, config) if isinstance(config, Qwen3_5MoeConfig) else None,
        )

    def _experts(self, prefix: str, config: Qwen3_5MoeConfig) -> ExpertWeights:
        def stacked(path: str) -> Matrix:
            name = prefix + path
            shape = config.expert_shapes(0)[path]
            names = [name] if name in self._tensors.shapes else separate_experts(name, shape)
            return self._matrix(*names, whole=False)

        return ExpertWeights(
            count=config.num_experts,
            per_token=config.experts_per_token,
            router=self._matrix(prefix + "mlp.gate.weight", prefix + "mlp.shared_expert_gate.weight", kind="none"),
            gate_up=stacked(GATE_UP),
            down=stacked(DOWN),
        )

    def _attention(self, prefix: str, *, copied: bool) -> AttentionWeights:
        config = self._config
        norms = [
            self._norm(prefix + "q_norm.weight").expand(config.num_heads, -1),
            self._norm(prefix + "k_norm.weight").expand(config.num_kv_heads, -1),
        ]
        return AttentionWeights(
            in_proj=self._matrix(
                *(f"{prefix}{name}_proj.weight" for name in "qkv"),
                first_rows=query_row_order(config).to(self._device),
                copied=copied,
            ),
            qk_norm=torch.cat(norms).contiguous(),
            out_proj=self._matrix(prefix + "o_proj.weight", copied=copied),
        )

    def _delta_net(self, prefix: str, *, copied: bool) -> DeltaNetWeights:
        return DeltaNetWeights(
            in_proj=self._matrix(*(f"{prefix}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")), copied=copied),
            conv=self._copy(prefix + "conv1d.weight", self._dtype).squeeze(1).t().contiguous(),
            negative_a=-self._copy(prefix + "A_log", torch.float32).exp(),
            dt_bias=self._copy(prefix + "dt_bias", torch.float32),
            norm=self._copy(prefix + "norm.weight", torch.float32),
            out_proj=self._matrix(prefix + "out_proj.weight", copied=copied),
        )

    def _copy(self, name: str, dtype: torch.dtype) -> Tensor:
        # Always a copy: a tensor that aliases the mapped file would change when the file does.
        target = torch.empty(self._tensors.shapes[name], dtype=dtype, device=self._device)
        self._fill(name, target)
        return target

    def _matrix(
        self,
        *names: str,
        first_rows: Tensor | None = None,
        kind: str = "",
        whole: bool = True,
        copied: bool = False,
    ) -> Matrix:
        """The named tensors one below the other; of one with more than two dimensions all rows.

        Args:
            first_rows: the order of the first one's rows.
            kind: how to store them; empty: like all layers.
            whole: products are of all rows, not of a part.
            copied: with a copy for prompts.
        """
        shapes = [self._tensors.shapes[name] for name in names]
        counts = [math.prod(shape[:-1]) for shape in shapes]
        matrix = torch.empty(sum(counts), shapes[0][-1], dtype=self._dtype, device=self._device)
        least = torch.zeros(len(matrix), device=self._device)
        for name, target, scales in zip(names, torch.split(matrix, counts), torch.split(least, counts), strict=True):
            self._fill(name, target, scales)
        if first_rows is not None:
            head = slice(counts[0])
            matrix[head], least[head] = matrix[head][first_rows], least[head][first_rows]
        kind = kind or self._storage.quantization
        placed = _in_memory_order(matrix) if kind == "none" and whole else matrix
        return self._stored(placed, kind, least, copied=copied)

    def _stored(self, matrix: Tensor, kind: str, least: Tensor | None = None, *, copied: bool = False) -> Matrix:
        return quantize(
            matrix,
            kind,
            workspace=self._workspace,
            invariant=self._storage.invariant,
            kernels=self._kernels,
            least=least,
            prompts=copied,
        )

    def _fill(self, name: str, target: Tensor, scales: Tensor | None = None) -> None:
        """Copies a tensor to where it belongs, float8 times its scales.

        Args:
            target: of the model's dtype; for a matrix also as all of its rows, [N, in].
            scales: [N] float32, where the largest scale of each row goes, if it has any.
        """
        source, found = self._tensors.read(name), self._tensors.scales(name)
        if found is None:
            self._move(source, target)
            return
        # The device converts: a core takes longer for it than the file does.
        raw = torch.empty(target.shape, dtype=source.dtype, device=self._device)
        self._move(source.view(torch.uint8), raw.view(torch.uint8))
        target.copy_(raw)
        by_row = found.values.to(self._device)
        multiply_groups(target.flatten(0, -2), by_row, found.width)
        if scales is not None:
            torch.amax(by_row, 1, out=scales)

    def _move(self, source: Tensor, target: Tensor) -> None:
        if self._uploader is not None:
            self._uploader.copy(source, target)
        else:
            target.copy_(source.view(target.shape))

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
