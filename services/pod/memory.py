"""The memory plan of a pod: what the model needs, out of what the device has."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from services.engine.memory.plan import Footprint, MemoryPlan, plan_memory
from services.engine.model.config import ModelConfig
from services.engine.model.lora import LoraSlots
from services.engine.model.qwen3_5 import Qwen3_5
from services.engine.settings import EngineSettings

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_LOGIT_COPIES = 4
"""Float32 [rows, vocabulary] tensors that sampling has alive at once."""
_ACTIVATION_COPIES = 8
"""Tensors as wide as the widest layer that a step has alive at once."""


def device_bytes(device: torch.device, in_use: int) -> int:
    """Bytes this process may count on, with ``in_use`` of them already taken by it.

    On CUDA: what is free on the card now; on CPU: the machine's memory or the container's limit, the lower one.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + in_use
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return total


def footprint(model: Qwen3_5, settings: EngineSettings) -> Footprint:
    """Bytes the model needs of each thing."""
    config = model.config
    shapes = [shape for layer in range(config.num_layers) for shape in config.linear_shapes(layer).values()]
    widest = max(out for out, _ in shapes)
    return Footprint(
        weights=model.weights.nbytes(),
        block=model.cache_bytes_per_block(settings.block_size),
        slot=model.state_bytes_per_slot(),
        adapter_slot=LoraSlots.bytes_per_slot(config, settings.max_lora_rank, model.dtype),
        workspace=4 * (_LOGIT_COPIES * settings.max_num_seqs * config.vocab_size)
        + 4 * _ACTIVATION_COPIES * settings.token_budget * widest,
    )


def state_slots(settings: EngineSettings) -> int:
    """State slots to allocate: scratch, one a sequence, and the prefix cache's snapshots."""
    return 1 + settings.max_num_seqs + (settings.state_snapshots if settings.prefix_cache else 0)


def plan(model: Qwen3_5, settings: EngineSettings) -> MemoryPlan:
    """Divides the device.

    Raises:
        DoesNotFit: the settings ask for more than there is; the message has the numbers.
    """
    needs = footprint(model, settings)
    context = settings.max_model_len or model.config.max_position_embeddings
    on_cpu = model.device.type == "cpu"
    return plan_memory(
        int(device_bytes(model.device, needs.weights) * settings.memory_fraction),
        needs,
        block_size=settings.block_size,
        num_slots=state_slots(settings),
        adapter_slots=settings.adapter_slots + 1,
        num_blocks=settings.num_blocks,
        kv_bytes=settings.kv_bytes_on_cpu if on_cpu else int(settings.kv_cache_bytes),
        training_bytes=None if settings.train_memory_bytes == 0 else int(settings.train_memory_bytes),
        useful_blocks=1 + settings.max_num_seqs * -(-context // settings.block_size),
    )


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the text model, a tied head counted once."""
    linear = sum(out * into for layer in range(config.num_layers) for out, into in config.linear_shapes(layer).values())
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    delta_net = config.conv_dim * config.conv_kernel + 2 * config.linear_value_heads + config.linear_value_dim
    norms = config.hidden_size * (2 * config.num_layers + 1) + 2 * config.head_dim * config.num_full_layers
    return linear + embeddings + norms + delta_net * config.num_linear_layers
