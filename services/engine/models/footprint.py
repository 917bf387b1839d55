"""Memory of a model in bytes, from its config alone: nothing is loaded to find out that it does not fit.

Tests hold these figures against the tensors themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from kernels.quantize import GROUP
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.errors import InvalidRequest
from services.engine.models.config import ModelConfig
from services.engine.models.weights.prompts import NONE, PromptProducts

Quantization = Literal["none", "fp8", "int4"]
_HEAD_COPY_BYTES = 64 * 2**20
"""A tied head up to this size gets a copy in the faster memory order; a larger one is not worth the memory."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage of weight matrices."""

    quantization: Quantization = "none"
    """Format of the layers' matrices."""
    float8_head: bool = False
    """The head is an fp8 matrix of its own, also where the embedding is tied to it."""
    invariant: bool = False
    """Products do not depend on how many rows they have."""
    int4_draft_head: bool = False
    """The mtp layer draws draft tokens through an int4 copy of the head, which is read in a quarter of the time."""
    prompts: PromptProducts = NONE
    """Products of prompts that are computed with float8 copies of their matrices."""

    def has_draft_head(self, config: ModelConfig, itemsize: int) -> bool:
        """True if a model of numbers of ``itemsize`` bytes that has the mtp layer has that copy."""
        return self.int4_draft_head and itemsize == 2 and config.hidden_size % GROUP == 0

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidRequest if groups of numbers do not divide the inputs of a matrix, or prompts
        cannot be computed as they are to be."""
        if self.quantization == "none":
            self.prompts.check(config, GROUP)
            return
        if self.prompts:
            raise InvalidRequest(
                f"TEMPER_PREFILL_FLOAT8={self.prompts} is for weights in the model's dtype, and these are "
                f"{self.quantization} (an fp8 model computes its prompts in float8 anyway): set it to none, or "
                "TEMPER_QUANTIZATION=none",
                param="prefill_float8",
            )
        for layer in range(config.num_layers):
            shapes = config.linear_shapes(layer) | config.expert_shapes(layer)
            for module, (*_, into) in shapes.items():
                if into % GROUP:
                    raise InvalidRequest(
                        f"TEMPER_QUANTIZATION={self.quantization} needs inputs in multiples of {GROUP}, "
                        f"layers.{layer}.{module} has {into}; use none",
                        param="quantization",
                    )


PLAIN = Storage()


@dataclass(frozen=True, slots=True)
class Formats:
    """Storage of weights, keys, values and states."""

    itemsize: int
    """Bytes of a number of the model's dtype."""
    storage: Storage = PLAIN
    head_copy: bool = False
    """A tied head is a second copy of the embedding in another memory order."""
    kv_float8: bool = False
    mtp: bool = False
    """True if a drafter is loaded: the mtp layer, or what is of ``form``."""
    form: DrafterForm = MTP_FORM
    state_itemsize: int = 4
    """Bytes of a number of a recurrent state."""
    waiting_writes: int = 0
    """Writes of a recurrent state that are kept beside it until it is written back."""


def matrix_bytes(out: int, into: int, itemsize: int, quantization: Quantization) -> int:
    """Bytes of one [out, into] weight matrix."""
    if quantization == "fp8":
        return out * into + 4 * out
    if quantization == "int4":
        # Half a byte a number; a bfloat16 scale and a byte of zero point a group.
        return out * into // 2 + out * (into // GROUP) * 3
    return out * into * itemsize


def weight_bytes(config: ModelConfig, formats: Formats) -> int:
    """Bytes of all weights as they are stored."""
    shapes = [shape for n in range(config.num_layers) for shape in config.linear_shapes(n).values()]
    stacks = [shape for n in range(config.num_layers) for shape in config.expert_shapes(n).values()]
    total = config.vector_bytes(formats.itemsize)
    if formats.mtp:
        form = formats.form
        more = form.layers - 1
        linears = config.mtp_linear_shapes()
        shapes += linears.values()
        shapes += more * [shape for name, shape in linears.items() if name.startswith("layers.")]
        stacks += form.layers * list(config.mtp_expert_shapes().values())
        # Three of its norms are outside its layers.
        total += form.layers * config.mtp_vector_bytes(formats.itemsize) - more * 12 * config.hidden_size
        total += max(0, form.block - 1) * config.hidden_size * formats.itemsize
        if formats.storage.has_draft_head(config, formats.itemsize):
            total += matrix_bytes(config.vocab_size, config.hidden_size, formats.itemsize, "int4")
    shapes += [(count * out, into) for count, out, into in stacks]
    total += sum(matrix_bytes(out, into, formats.itemsize, formats.storage.quantization) for out, into in shapes)
    embedding = config.vocab_size * config.hidden_size * formats.itemsize
    if formats.storage.float8_head:
        return total + embedding + matrix_bytes(config.vocab_size, config.hidden_size, formats.itemsize, "fp8")
    own_head = formats.head_copy or not config.tie_word_embeddings
    return total + embedding * (2 if own_head else 1)


def float8_prompt_bytes(config: ModelConfig, formats: Formats) -> int:
    """Bytes of the float8 copies of matrices that prompts are multiplied with."""
    return sum(matrix_bytes(*shape, 1, "fp8") for _, _, shape in formats.storage.prompts.matrices(config))


def float8_training_bytes(config: ModelConfig, formats: Formats) -> int:
    """Bytes of the float8 copies of the layers' matrices that training multiplies with, transposed and not; of a float8
    model's own matrices only the transposed ones are copies, and so where prompts have the others. Experts have none.

    Raises:
        InvalidRequest: groups of numbers do not divide the inputs of a matrix.
    """
    total = -float8_prompt_bytes(config, formats)
    for layer in range(config.num_layers):
        shapes = config.linear_shapes(layer)
        for group in config.linear_groups(layer).values():
            out, into = sum(shapes[module][0] for module in group), shapes[group[0]][1]
            if into % GROUP:
                raise InvalidRequest(
                    f"TEMPER_TRAIN_FLOAT8 needs inputs in multiples of {GROUP}, layers.{layer}.{group[0]} has {into}: "
                    "unset it",
                    param="train_float8",
                )
            rest = out % GROUP
            total += matrix_bytes(into, out - rest, formats.itemsize, "fp8") + rest * into * formats.itemsize
            if formats.storage.quantization != "fp8":
                total += matrix_bytes(out, into, formats.itemsize, "fp8")
    return total


def block_bytes(config: ModelConfig, block_size: int, formats: Formats) -> int:
    """Bytes of K and V of one block over all full-attention layers and the drafter's, scales included."""
    layout = config.cache_layout
    head = layout.head_dim + 4 if formats.kv_float8 else layout.head_dim * formats.itemsize
    layers = layout.kv_layers + (formats.form.layers if formats.mtp else 0)
    return 2 * layers * block_size * layout.kv_heads * head


def slot_bytes(config: ModelConfig, formats: Formats) -> int:
    """Bytes of convolution and recurrent state of one sequence over all layers that have one."""
    layout = config.cache_layout
    conv = layout.conv_channels * (layout.conv_kernel - 1) * formats.itemsize
    recurrent = layout.state_heads * layout.state_value_dim * layout.state_key_dim * formats.state_itemsize
    write = layout.state_key_dim * formats.itemsize + 4 * layout.state_value_dim + 4
    waiting = formats.waiting_writes * write + (layout.state_value_dim if formats.waiting_writes else 0)
    return layout.state_layers * (conv + recurrent + layout.state_heads * waiting)


@lru_cache
def widest_output(config: ModelConfig) -> int:
    """Numbers a token of the widest fused projection, or of its experts' outputs."""
    widest = 0
    for layer in range(config.num_layers):
        shapes = config.linear_shapes(layer)
        groups = config.linear_groups(layer).values()
        widest = max(widest, *(sum(shapes[module][0] for module in modules) for modules in groups))
    return max(widest, config.expert_outputs())


def copies_head(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """True if a tied head is a second copy of the embedding in the faster memory order; only the CPU cares."""
    small = config.vocab_size * config.hidden_size * dtype.itemsize <= _HEAD_COPY_BYTES
    return config.tie_word_embeddings and device.type == "cpu" and small
