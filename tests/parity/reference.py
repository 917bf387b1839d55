"""Random tiny checkpoints, transformers' answer to them, and a driver that runs our model the way the engine does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5

BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one-kv-head": {"num_key_value_heads": 1, "linear_num_key_heads": 1, "tie_word_embeddings": False},
    "odd-heads": {
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 22,
        "linear_value_head_dim": 18,
        "linear_conv_kernel_dim": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    "odd-groups": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
        "linear_conv_kernel_dim": 2,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "tie_word_embeddings": False,
    },
    "experts": {
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 36,
        "shared_expert_intermediate_size": 52,
        "tie_word_embeddings": False,
    },
}

LENGTHS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300)
CHUNKS = (1, 7, 16, 64, None)
BAR = 2e-4
"""Largest absolute difference of logits."""


SEED = 2


@torch.no_grad()
def make_checkpoint(name: str, path: Path, seed: int = SEED) -> Qwen3_5ForCausalLM:
    """Saves a random model of CONFIGS[name] to ``path`` and returns it. Its weights are large enough for logits of
    order one and decays from fast to slow, so that a wrong state would show. With some seeds a token's DeltaNet output
    is nearly zero before its norm, and transformers' own gradients are 1e-4 off a float64 computation; with this seed
    they are within 2e-5 for every configuration. How far rounding alone moves ours: `tests.parity.conditioning`."""
    torch.manual_seed(seed)
    if "num_experts" in CONFIGS[name]:
        reference = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**(BASE | CONFIGS[name])))
        reference.set_experts_implementation("eager")
    else:
        reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(BASE | CONFIGS[name])))
    reference.eval()
    for parameter_name, parameter in reference.named_parameters():
        if parameter_name.endswith("A_log"):
            parameter.uniform_(-4.0, 1.5)
        elif parameter_name.endswith("dt_bias"):
            parameter.uniform_(-3.0, 1.0)
        elif "norm" in parameter_name:
            parameter.add_(torch.randn_like(parameter) * 0.2)
        elif "conv1d" in parameter_name:
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        elif "embed_tokens" in parameter_name or "lm_head" in parameter_name:
            parameter.copy_(torch.randn_like(parameter) * 0.15)
        else:
            parameter.copy_(torch.randn_like(parameter) * 0.7 * parameter.shape[-1] ** -0.5)
    reference.save_pretrained(path)
    return reference


@dataclass
class Place:
    """One sequence's place in the caches."""

    slot: int
    blocks: list[int]
    adapter: int = 0
    done: int = 0


class Driver:
    """Runs batches of chunks, as scheduler and runner do, on caches that start full of garbage."""

    def __init__(
        self,
        model: Qwen3_5,
        *,
        num_slots: int = 8,
        block_size: int = 16,
        length: int = 448,
        lora: LoraSlots | None = None,
    ) -> None:
        self.model, self.lora, self.block_size = model, lora, block_size
        per_sequence = -(-length // block_size)
        self.cache: CacheBuffers = model.allocate_cache(1 + num_slots * per_sequence, block_size, num_slots + 1)
        for pool in (*self.cache.keys, *self.cache.values, *self.cache.conv_states, *self.cache.recurrent_states):
            pool.normal_(0, 100)
        generator = torch.Generator().manual_seed(7)
        order = (1 + torch.randperm(num_slots * per_sequence, generator=generator)).view(num_slots, per_sequence)
        self._free = [Place(slot + 1, order[slot].tolist()) for slot in range(num_slots)]

    def open(self, adapter: int = 0) -> Place:
        sequence = self._free.pop(0)
        sequence.adapter, sequence.done = adapter, 0
        return sequence

    def close(self, sequence: Place) -> None:
        self._free.append(sequence)

    def run(self, work: Sequence[tuple[Place, Sequence[int]]], *, all_rows: bool = True) -> list[Tensor]:
        """Logits of every row of each chunk (or of the last rows); decodes must come first."""
        batch = self.batch(work, all_rows=all_rows)
        logits = self.model.logits(self.model.forward(batch, self.cache, self.lora))
        for sequence, tokens in work:
            sequence.done += len(tokens)
        return list(logits.split(list(batch.lengths) if all_rows else [1] * len(work)))

    def batch(self, work: Sequence[tuple[Place, Sequence[int]]], *, all_rows: bool = True) -> ForwardBatch:
        decodes = 0
        for sequence, tokens in work:
            if len(tokens) != 1 or sequence.done == 0:
                break
            decodes += 1
        lengths = [len(tokens) for _, tokens in work]
        starts = [sequence.done for sequence, _ in work]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        tables = torch.zeros(len(work), max(len(s.blocks) for s, _ in work), dtype=torch.int64)
        for row, (sequence, _) in enumerate(work):
            tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
        owner = torch.repeat_interleave(torch.arange(len(work)), torch.tensor(lengths))
        kv_slots = tables[owner, positions // self.block_size] * self.block_size + positions % self.block_size
        rows = torch.arange(len(positions)) if all_rows else torch.cumsum(torch.tensor(lengths), 0) - 1
        adapters = torch.tensor([sequence.adapter for sequence, _ in work])
        return ForwardBatch(
            token_ids=torch.tensor([token for _, tokens in work for token in tokens]),
            positions=positions,
            kv_slots=kv_slots,
            block_tables=tables,
            state_slots=torch.tensor([sequence.slot for sequence, _ in work]),
            adapter_slots=adapters,
            has_adapters=bool(adapters.any()),
            num_decodes=decodes,
            lengths=lengths,
            starts=starts,
            logit_rows=rows,
        )

    def prefill(self, tokens: Sequence[int], chunk: int | None, *, adapter: int = 0) -> tuple[Place, Tensor]:
        """The whole prompt alone, in chunks; logits of all its rows."""
        sequence = self.open(adapter)
        size = chunk or len(tokens)
        parts = [self.run([(sequence, tokens[i : i + size])])[0] for i in range(0, len(tokens), size)]
        return sequence, torch.cat(parts)


def prompt(length: int, vocab: int = 211, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(1000 + length + seed)).tolist()


@torch.no_grad()
def reference_logits(reference: Qwen3_5ForCausalLM, tokens: Sequence[int]) -> Tensor:
    """[T, vocab] of one pass over the whole text, of a float32 model without its rounding: that alone reaches 1.7e-4
    with the matrix products of some processors, where ours is within 5e-5."""
    if reference.dtype != torch.float32:
        return reference(torch.tensor([list(tokens)])).logits[0]
    exact = copy.deepcopy(reference).double()
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        logits = exact(torch.tensor([list(tokens)])).logits[0]
    assert logits.dtype == torch.float64
    return logits
