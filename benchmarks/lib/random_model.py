"""Random weights made on the device: speed does not depend on weights, and no checkpoint has to be written and read."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.quantize import GROUP, Fp8Weight, Int4Weight
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.engine.models.footprint import Quantization
from services.engine.models.lora.binding import BoundAdapter, BoundTarget
from services.engine.models.lora.targets import TARGET_MODULES, target_shapes
from services.engine.models.qwen3_5.config import LayerType, Qwen3_5Config
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig
from services.engine.models.qwen3_5.weights import (
    AttentionWeights,
    DeltaNetWeights,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
    MtpWeights,
)
from services.engine.models.weights.matrix import DenseMatrix, Fp8Matrix, Int4Matrix, Matrix, quantize
from services.engine.models.weights.prompts import NONE, Product, PromptProducts

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs
    from kernels.gpu.linear.skinny import SplitWorkspace


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Makes weights of the sizes, dtypes and layout that services.engine.models.qwen3_5.loading.loader gives them."""

    config: Qwen3_5Config
    device: torch.device
    quantization: Quantization
    workspace: SplitWorkspace | None
    dtype: torch.dtype = torch.bfloat16
    empty: bool = False
    """Memory of any contents instead: enough to launch kernels that do not run."""
    kernels: KernelConfigs | None = None
    """Configurations of the kernels that run the weights; None: those that fit the device."""
    mtp: bool = False
    """With the layer that predicts the token after next."""
    form: DrafterForm = MTP_FORM
    """Of a drafter in its place."""
    invariant: bool = False
    """Products do not depend on how many rows they have."""
    draft_head: bool = False
    """The mtp layer has an int4 copy of the head."""
    prompts: PromptProducts = NONE
    """Products of prompts that are computed with float8 copies."""

    def build(self) -> ModelWeights:
        """All layers, logits of order one, decays from fast to slow."""
        config = self.config
        copied = self.prompts.of_layer
        layers = tuple(self._layer(kind, copied(index)) for index, kind in enumerate(config.layer_types))
        embedding = self._normal(config.vocab_size, config.hidden_size, std=config.hidden_size**-0.5)
        head: Matrix = DenseMatrix(embedding, self.workspace, self.invariant, self.kernels)
        if self.quantization != "none":
            head = self._stored(embedding, "fp8")
        elif not config.tie_word_embeddings:
            head = self._matrix(config.vocab_size, config.hidden_size, "none")
        mtp = self._mtp_layer(embedding) if self.mtp else None
        rows = self.prompts.rows if self.prompts else 0
        return ModelWeights(embedding, layers, self._ones(config.hidden_size), head, mtp, self.kernels, rows)

    def _mtp_layer(self, embedding: Tensor) -> MtpWeights:
        hidden = self.config.hidden_size
        return MtpWeights(
            embedding_norm=self._ones(hidden),
            hidden_norm=self._ones(hidden),
            fc=self._matrix(hidden, 2 * hidden),
            layers=tuple(self._layer("full_attention") for _ in range(self.form.layers)),
            final_norm=self._ones(hidden),
            places=self._normal(self.form.block - 1, hidden, std=1.0) if self.form.block else None,
            head=self._stored(embedding, "int4") if self.draft_head else None,
        )

    def _layer(self, kind: LayerType, copied: Set[Product] = frozenset()) -> LayerWeights:
        config = self.config
        return LayerWeights(
            input_norm=self._ones(config.hidden_size),
            mixer=self._attention(copied="attention" in copied)
            if kind == "full_attention"
            else self._delta_net(copied="linear_attention" in copied),
            post_norm=self._ones(config.hidden_size),
            gate_up=self._matrix(2 * config.intermediate_size, config.hidden_size, copied="mlp" in copied),
            down=self._matrix(config.hidden_size, config.intermediate_size, copied="mlp" in copied),
            experts=self._experts(config) if isinstance(config, Qwen3_5MoeConfig) else None,
        )

    def _experts(self, config: Qwen3_5MoeConfig) -> ExpertWeights:
        count, hidden, size = config.num_experts, config.hidden_size, config.expert_size
        return ExpertWeights(
            count=count,
            per_token=config.experts_per_token,
            router=self._matrix(count + 1, hidden, "none"),
            gate_up=self._matrix(count * 2 * size, hidden),
            down=self._matrix(count * hidden, size),
        )

    def _attention(self, *, copied: bool) -> AttentionWeights:
        config = self.config
        return AttentionWeights(
            in_proj=self._matrix(2 * (config.query_size + config.kv_size), config.hidden_size, copied=copied),
            qk_norm=self._ones(config.num_heads + config.num_kv_heads, config.head_dim),
            out_proj=self._matrix(config.hidden_size, config.query_size, copied=copied),
        )

    def _delta_net(self, *, copied: bool) -> DeltaNetWeights:
        config, heads = self.config, self.config.linear_value_heads
        return DeltaNetWeights(
            in_proj=self._matrix(config.conv_dim + config.value_size + 2 * heads, config.hidden_size, copied=copied),
            conv=self._normal(config.conv_kernel, config.conv_dim, std=0.5),
            negative_a=-torch.exp(torch.rand(heads, device=self.device) * 5.5 - 4.0),
            dt_bias=torch.rand(heads, device=self.device) * 4.0 - 3.0,
            norm=self._ones(config.linear_value_dim),
            out_proj=self._matrix(config.hidden_size, config.value_size, copied=copied),
        )

    def _matrix(self, outputs: int, inputs: int, kind: str = "", *, copied: bool = False) -> Matrix:
        # Small enough that 32 layers one after the other stay finite.
        dense = self._normal(outputs, inputs, std=0.7 * inputs**-0.5)
        made = self._stored(dense, kind or self.quantization)
        if not copied or not isinstance(made, DenseMatrix):
            return made
        copy = self._stored(dense, "fp8")
        return replace(made, float8=copy) if isinstance(copy, Fp8Matrix) else made

    def _stored(self, dense: Tensor, kind: str) -> DenseMatrix | Fp8Matrix | Int4Matrix:
        if not self.empty or kind == "none":
            invariant = self.invariant
            return quantize(dense, kind, workspace=self.workspace, invariant=invariant, kernels=self.kernels)
        outputs, inputs = dense.shape

        def made(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        if kind == "fp8":
            values = made(outputs, inputs, dtype=torch.float8_e4m3fn)
            fp8 = Fp8Weight(values, made(outputs, dtype=torch.float32))
            return Fp8Matrix(fp8, self.dtype, self.workspace, self.invariant, self.kernels)
        groups = inputs // GROUP
        packed = made(groups, outputs, GROUP // 4, dtype=torch.int16)
        scale, zero = made(groups, outputs, dtype=torch.bfloat16), made(groups, outputs, dtype=torch.uint8)
        int4 = Int4Weight(packed, scale, zero)
        return Int4Matrix(int4, self.dtype, self.workspace, self.invariant, self.kernels)

    def _normal(self, *shape: int, std: float) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        return made if self.empty else made.normal_(std=std)

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)


def random_adapter(config: Qwen3_5Config, rank: int) -> BoundAdapter:
    """Random adapter on all linear layers, its tensors on the CPU."""
    targets = {
        path: BoundTarget(
            torch.empty(rank, inputs, dtype=torch.bfloat16).normal_(std=inputs**-0.5),
            torch.empty(outputs, rank, dtype=torch.bfloat16).normal_(std=0.01),
            alpha=2.0 * rank,
            scale=2.0,
        )
        for path, (outputs, inputs) in target_shapes(config).items()
    }
    return BoundAdapter(targets, rank, 2.0 * rank, False, TARGET_MODULES, config.module_prefix)
