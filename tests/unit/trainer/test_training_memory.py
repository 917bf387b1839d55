"""The byte plan of a job against what autograd really keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import DoesNotFit
from services.common.jobs import LoraSettings
from services.engine.model.config import ModelConfig
from services.engine.model.lora import LoraParams
from services.engine.model.qwen3_5 import Qwen3_5
from services.trainer.memory import MARGIN, check_fits, estimate
from tests.training_support import CPU, write_checkpoint

TOKENS = 128


def storages(value: Any) -> set[int]:
    """Addresses of all tensors in nested dataclasses."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, tuple):
        return set().union(*map(storages, value))
    if not dataclasses.is_dataclass(value):
        return set()
    return set().union(*(storages(getattr(value, field.name)) for field in dataclasses.fields(value)))


def kept_bytes(model: Qwen3_5, lora: LoraParams, *, checkpointing: bool) -> int:
    fixed = storages(model.weights) | {parameter.untyped_storage().data_ptr() for parameter in lora.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in fixed:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.arange(TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.forward_train(tokens, [TOKENS], lora, checkpointing=checkpointing, give_way=lambda: None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_the_estimate_is_an_upper_bound_and_not_far_off(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    layers = 6
    write_checkpoint(
        tmp_path,
        {},
        num_hidden_layers=layers,
        layer_types=[kind] * layers,
        hidden_size=128,
        intermediate_size=256,
        head_dim=32,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    model = Qwen3_5.from_directory(tmp_path, dtype=dtype, device=CPU)
    lora = LoraParams.create(model.config, LoraSettings(rank=8))
    numbers: dict[str, Any] = {
        "adapter_numbers": lora.num_parameters(),
        "rank": 8,
        "tokens": TOKENS,
        "itemsize": dtype.itemsize,
    }
    plain = estimate(model.config, checkpointing=False, **numbers).activations
    measured = kept_bytes(model, lora, checkpointing=False)
    # One layer's worth of working space and the margin come on top of what is kept.
    assert 1.0 < plain / measured < 1.25 * MARGIN * (layers + 1) / layers
    recomputed = estimate(model.config, checkpointing=True, **numbers).activations
    assert kept_bytes(model, lora, checkpointing=True) + measured // layers < recomputed < plain


def fits(config: ModelConfig, budget: int, *, checkpointing: bool = False) -> None:
    check_fits(
        config, adapter_numbers=10_000, rank=8, tokens=2048, itemsize=4, checkpointing=checkpointing, budget=budget
    )


def test_refusals_say_what_would_fit(host: Any) -> None:
    config = host.model.config
    need = {
        flag: estimate(config, adapter_numbers=10_000, rank=8, tokens=2048, itemsize=4, checkpointing=flag).total
        for flag in (False, True)
    }
    fits(config, need[False])
    with pytest.raises(DoesNotFit, match="set gradient_checkpointing to true"):
        fits(config, need[True])
    with pytest.raises(
        DoesNotFit, match=r"max_tokens_per_microbatch to at most (\d+) with gradient_checkpointing"
    ) as raised:
        fits(config, need[True] // 2, checkpointing=True)
    advice = int(str(raised.value).split("at most ")[1].split()[0])
    check_fits(
        config,
        adapter_numbers=10_000,
        rank=8,
        tokens=advice,
        itemsize=4,
        checkpointing=True,
        budget=need[True] // 2,
    )
    with pytest.raises(DoesNotFit, match=r"lower lora\.rank"):
        fits(config, 1000)
