"""The byte plan of a job against what autograd really keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gpu.segments import TILE
from kernels.gpu.train.documents import Documents
from services.common.errors import DoesNotFit
from services.common.jobs import LoraSettings
from services.engine.models.interface import Recompute
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.training.adapters import WorkingAdapter
from services.engine.models.qwen3_5.training.trunk import Trunk
from services.trainer.memory.estimate import MARGIN, Workload, _fused_bytes, check_fits, estimate
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.training_support import CPU, write_checkpoint

TOKENS = 128
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not dataclasses.is_dataclass(value):
        return []
    return [found for field in dataclasses.fields(value) for found in tensors(getattr(value, field.name))]


def storages(value: Any) -> set[int]:
    """Addresses of all tensors in nested dataclasses."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, tuple):
        return set().union(*map(storages, value))
    if not dataclasses.is_dataclass(value):
        return set()
    return set().union(*(storages(getattr(value, field.name)) for field in dataclasses.fields(value)))


def kept_bytes(model: Qwen3_5, lora: LoraParams, recompute: Recompute) -> int:
    fixed = storages(model.weights) | {parameter.untyped_storage().data_ptr() for parameter in lora.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in fixed:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.arange(TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.forward_train(tokens, [TOKENS], lora, recompute=recompute, give_way=lambda: None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "mlp"), [("linear_attention", {}), ("full_attention", {}), ("full_attention", EXPERTS)]
)
def test_the_estimate_is_an_upper_bound_and_not_far_off(
    tmp_path: Path, kind: str, mlp: dict[str, int], dtype: torch.dtype
) -> None:
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
        **mlp,
    )
    model = Qwen3_5.from_directory(tmp_path, dtype=dtype, device=CPU)
    lora = LoraParams.create(model.config, LoraSettings(rank=8))
    levels: tuple[Recompute, ...] = ("none", "selective", "full")
    estimates = {
        level: estimate(model.config, Workload(lora.num_parameters(), 8, TOKENS, dtype.itemsize, level, fused=False))
        for level in levels
    }
    plain, selective, recomputed = (estimates[level].activations for level in levels)
    measured = kept_bytes(model, lora, "none")
    # One layer's worth of working space and the margin come on top of what is kept.
    assert 1.0 < plain / measured < 1.25 * MARGIN * (layers + 1) / layers
    assert kept_bytes(model, lora, "full") + measured // layers < recomputed < plain
    assert kept_bytes(model, lora, "full") < kept_bytes(model, lora, "selective") < measured
    assert kept_bytes(model, lora, "selective") + measured // layers < selective < plain


@pytest.mark.sampled
@pytest.mark.parametrize("level", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("kind", "mlp"), [("linear_attention", {}), ("full_attention", {}), ("full_attention", EXPERTS)]
)
def test_what_a_gpu_keeps_is_what_the_estimate_counts(
    tmp_path: Path, kind: str, mlp: dict[str, int], level: Recompute
) -> None:
    """One tile of tokens through one layer, in Triton's interpreter where there is no GPU."""
    write_checkpoint(
        tmp_path, {}, num_hidden_layers=1, layer_types=[kind], hidden_size=64, intermediate_size=128, **mlp
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen3_5.from_directory(tmp_path, dtype="float32", device=device)
    lora = LoraParams.create(model.config, LoraSettings(rank=8), device=device)
    adapter = WorkingAdapter(lora, model.config, model.dtype)
    documents = Documents.build([TILE], device)
    layer = Trunk(model.config, model.weights, model.rotation, documents, adapter).layers[0]
    middle, kept = layer.mixer(torch.randn(TILE, model.config.hidden_size, device=device), level)
    layer.mlp(middle, kept, level)
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(kept)}
    counted = TILE * _fused_bytes(model.config, 0, Workload(1, 8, TILE, 4, level, fused=True), level)
    assert 0.95 * counted <= sum(found.values()) <= counted


def work(recompute: Recompute, tokens: int = 2048, *, fused: bool = False) -> Workload:
    return Workload(10_000, 8, tokens, 4, recompute, fused)


@pytest.mark.parametrize("fused", [False, True])
def test_refusals_say_what_would_fit(host: Any, fused: bool) -> None:
    config = host.model.config
    need = {level: estimate(config, work(level, fused=fused)).total for level in ("none", "selective", "full")}
    assert need["none"] > need["selective"] > need["full"]
    check_fits(config, work("none", fused=fused), need["none"])
    for level in ("selective", "full"):
        with pytest.raises(DoesNotFit, match=f'set recompute to "{level}"'):
            check_fits(config, work("none", fused=fused), need[level])
    with pytest.raises(DoesNotFit, match=r'max_tokens_per_microbatch to at most (\d+) with recompute "full"') as raised:
        check_fits(config, work("full", fused=fused), need["full"] // 2)
    advice = int(str(raised.value).split("at most ")[1].split()[0])
    check_fits(config, work("full", advice, fused=fused), need["full"] // 2)
    with pytest.raises(DoesNotFit, match=r"lower lora\.rank"):
        check_fits(config, work("none", fused=fused), 1000)


def test_a_job_of_nothing_is_no_job() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Workload(10_000, 8, 0, 4, "none", fused=False)
