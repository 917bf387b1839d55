"""The frozen weights as the forward pass wants them: projections that share an input are one matrix.

Matrices are [out, in], in the model's dtype or quantized; norm weights, A and dt_bias are float32, because they are
tiny and the reference computes with them in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from services.common.adapters.drafter_form import DrafterForm
from services.engine.models.weights.matrix import DenseMatrix, Matrix

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Weights of one Gated DeltaNet mixer."""

    in_proj: Matrix
    """Rows of in_proj_qkv | in_proj_z | in_proj_b | in_proj_a."""
    conv: Tensor
    """[kernel, conv_dim]: row j multiplies the input kernel - 1 - j tokens back."""
    negative_a: Tensor
    """[value_heads] float32: -exp(A_log)."""
    dt_bias: Tensor
    """[value_heads] float32."""
    norm: Tensor
    """[value_dim] float32, plain (not 1 + w)."""
    out_proj: Matrix


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of one gated full-attention mixer."""

    in_proj: Matrix
    """Rows gate | query | key | value: q_proj's interleaved [query | gate] per head is taken apart, so that the heads
    that get a norm and a rotation are contiguous."""
    qk_norm: Tensor
    """[heads + kv_heads, head_dim] float32: 1 + w of q_norm for each query head, of k_norm for each key head."""
    out_proj: Matrix


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of one layer's experts and of what chooses among them."""

    count: int
    per_token: int
    """Experts that a token passes."""
    router: Matrix
    """[count + 1, hidden], never quantized: a row for each expert's score, and the gate of the shared expert."""
    gate_up: Matrix
    """[count · 2 · size, hidden]: of one expert after the other the rows of gate_proj | up_proj."""
    down: Matrix
    """[count · hidden, size]: of one expert after the other the rows of down_proj."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer."""

    input_norm: Tensor
    """[hidden] float32: 1 + w, like every norm but DeltaNet's own."""
    mixer: DeltaNetWeights | AttentionWeights
    post_norm: Tensor
    gate_up: Matrix
    """Rows of gate_proj | up_proj, of the MLP that every token passes: with experts the shared one."""
    down: Matrix
    experts: ExpertWeights | None = None

    def of_prompts(self) -> LayerWeights:
        """The layer as rows of prompts pass it, where there are enough of them."""
        mixer = self.mixer
        return replace(
            self,
            mixer=replace(mixer, in_proj=mixer.in_proj.of_prompts(), out_proj=mixer.out_proj.of_prompts()),
            gate_up=self.gate_up.of_prompts(),
            down=self.down.of_prompts(),
        )


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The layer that predicts the token after next (multi-token prediction), with the model's embedding and head; or
    the layers of a block drafter, which has the same form."""

    embedding_norm: Tensor
    """[hidden] float32, as all norms here."""
    hidden_norm: Tensor
    fc: Matrix
    """[hidden, 2 · hidden], over the normed embedding of the next token | the normed hidden state."""
    layers: tuple[LayerWeights, ...]
    """Full attention, with keys and values of their own; one, unless it is a block drafter."""
    final_norm: Tensor
    head: Matrix | None = None
    """[vocab, hidden]: copy of the model's head to draw draft tokens through; None: the model's own."""
    places: Tensor | None = None
    """[block - 1, hidden], in the model's dtype: of a block drafter, what stands for the token that is not known yet at
    the second place and each behind it; None: the layer proposes tokens one after the other."""

    @property
    def form(self) -> DrafterForm:
        return DrafterForm() if self.places is None else DrafterForm(1 + len(self.places), len(self.layers))


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything the text model needs."""

    embedding: Tensor
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Matrix
    """[vocab, hidden]; the embedding itself when tied and not quantized."""
    mtp: MtpWeights | None = None
    """None: not there, or not asked for."""
    kernels: KernelConfigs | None = None
    """Configurations of the kernels that run these weights, the matrices' own; None: those that fit the device."""
    prompt_rows: int = 0
    """Fewest rows of prompts in a step that are multiplied with the copies that matrices have for them; 0: none has."""

    def prompts_in_float8(self, rows: int) -> bool:
        """True if so many rows of prompts in a step are multiplied with the copies. Decodes are then multiplied apart
        from them: their numbers do not depend on what is beside them."""
        return 0 < self.prompt_rows <= rows

    def nbytes(self) -> int:
        """Bytes of all weights, a tied head counted once; copies for prompts are not weights."""
        tensors = [self.embedding, self.final_norm]
        tied = isinstance(self.head, DenseMatrix) and self.head.weight.data_ptr() == self.embedding.data_ptr()
        matrices = [] if tied else [self.head]
        layers = self.layers
        if self.mtp is not None:
            tensors += [self.mtp.embedding_norm, self.mtp.hidden_norm, self.mtp.final_norm]
            matrices += [self.mtp.fc] if self.mtp.head is None else [self.mtp.fc, self.mtp.head]
            tensors += [] if self.mtp.places is None else [self.mtp.places]
            layers = (*layers, *self.mtp.layers)
        for layer in layers:
            tensors += [layer.input_norm, layer.post_norm]
            matrices += [layer.gate_up, layer.down, layer.mixer.in_proj, layer.mixer.out_proj]
            if layer.experts is not None:
                matrices += [layer.experts.router, layer.experts.gate_up, layer.experts.down]
            if isinstance(layer.mixer, DeltaNetWeights):
                tensors += [layer.mixer.conv, layer.mixer.negative_a, layer.mixer.dt_bias, layer.mixer.norm]
            else:
                tensors.append(layer.mixer.qk_norm)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + sum(m.nbytes for m in matrices)
