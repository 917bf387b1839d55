"""What a job needs beside the frozen weights, in bytes, before it allocates anything.

The activation figures count the tensors that autograd keeps (a test compares them with what it really keeps), plus
working space: an upper bound, not a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gated_delta import CHUNK
from services.common.errors import DoesNotFit
from services.engine.model.config import ModelConfig

MASTER_BYTES = 16
"""A trained number: float32 master, gradient, and AdamW's two moments."""
LOGIT_ROWS = 256
"""Rows whose logits exist at once."""
MARGIN = 1.1
"""For what is not counted."""


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of one job."""

    adapter: int
    """Masters, gradients and optimizer."""
    activations: int
    """Kept from forward to backward, at their peak."""
    logits: int
    """One tile of the head's output with its softmax, float32."""

    @property
    def total(self) -> int:
        return self.adapter + self.activations + self.logits


def estimate(
    config: ModelConfig, *, adapter_numbers: int, rank: int, tokens: int, itemsize: int, checkpointing: bool
) -> TrainingMemory:
    """Bytes for a job whose largest microbatch has ``tokens`` inputs and whose activations take ``itemsize`` bytes."""
    layers = [_layer_bytes(config, index, rank, itemsize) for index in range(config.num_layers)]
    # Checkpointing keeps each layer's input and one layer's activations. The backward of a layer works in about as
    # much again as its activations are.
    kept = config.num_layers * config.hidden_size * itemsize + max(layers) if checkpointing else sum(layers)
    final_norm = config.hidden_size * (2 * itemsize + 8)
    return TrainingMemory(
        adapter=adapter_numbers * MASTER_BYTES,
        activations=int(MARGIN * tokens * (kept + max(layers) + final_norm)),
        logits=min(tokens, LOGIT_ROWS) * config.vocab_size * 4 * 3,
    )


def _layer_bytes(config: ModelConfig, layer: int, rank: int, itemsize: int) -> int:
    """Bytes a token that one layer keeps, counted from its inputs to autograd: the numbers of ``narrow`` are of the
    model's dtype, those of ``wide`` float32."""
    narrow = 4 * config.intermediate_size + len(config.linear_shapes(layer)) * rank
    wide = 4 * config.hidden_size
    if config.layer_types[layer] == "full_attention":
        narrow += 6 * config.query_size + 4 * config.kv_size
        wide += (5 * (config.query_size + config.kv_size)) // 4
    else:
        narrow += config.conv_dim + 3 * config.value_size
        heads, key, value = config.linear_value_heads, config.linear_key_dim, config.linear_value_dim
        # Queries, keys and values of each value head, the [chunk, chunk] matrices, the states between chunks.
        wide += heads * (5 * key + 5 * value + 15 * CHUNK // 2 + 2 * key * value // CHUNK)
        wide += 6 * config.linear_key_heads * key
    return narrow * itemsize + wide * 4


def check_fits(
    config: ModelConfig,
    *,
    adapter_numbers: int,
    rank: int,
    tokens: int,
    itemsize: int,
    checkpointing: bool,
    budget: int,
) -> TrainingMemory:
    """The estimate, if it is within ``budget`` bytes.

    Raises:
        DoesNotFit: it is not; the message has the numbers and what would fit.
    """

    def need(count: int, recompute: bool) -> TrainingMemory:
        return estimate(
            config,
            adapter_numbers=adapter_numbers,
            rank=rank,
            tokens=count,
            itemsize=itemsize,
            checkpointing=recompute,
        )

    memory = need(tokens, checkpointing)
    if memory.total <= budget:
        return memory
    if not checkpointing and need(tokens, True).total <= budget:
        way_out = "set gradient_checkpointing to true"
    else:
        low, high = 0, tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if need(middle, True).total <= budget else (low, middle - 1)
        if low >= 1:
            way_out = f"set max_tokens_per_microbatch to at most {low} with gradient_checkpointing"
        else:
            way_out = (
                "choose a lower lora.rank or fewer lora.target_modules, or give the engine more memory for training"
            )
    raise DoesNotFit(
        f"the job needs {_mib(memory.total)} (adapter, gradients and optimizer {_mib(memory.adapter)}, activations of "
        f"{tokens} tokens {_mib(memory.activations)}, logits {_mib(memory.logits)}), and the memory plan leaves "
        f"{_mib(budget)} for training: {way_out}",
        param="max_tokens_per_microbatch",
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
