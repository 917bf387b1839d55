"""The fused forward of a model with experts against the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tests.kernels.gpu.interpreter  # noqa: F401
from services.engine.executors.cuda.runner import RunnerOptions
from tests.parity.fused_models import TINY_EXPERTS, decoded, random_model
from tests.parity.in_step import InStep
from tests.parity.test_fused import DEVICE, LIMITS, requests

QUANTIZABLE = replace(
    TINY_EXPERTS, hidden_size=128, intermediate_size=128, expert_size=128, linear_value_dim=64,
    layer_types=("linear_attention",),
)  # fmt: skip


def test_prefill_decode_and_mixed_steps() -> None:
    """More rows than pass experts one by one, and fewer; the shared expert is one of the chosen ones."""
    run = InStep(
        random_model(TINY_EXPERTS, torch.float32),
        random_model(TINY_EXPERTS, torch.float32, DEVICE),
        LIMITS,
        pending=True,
    )
    run.run(requests(1, 70, 5, tokens=2), arrivals=1)
    assert run.steps == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_adapters_of_the_shared_expert(batch_invariant: bool) -> None:
    """The shared expert is of another size than the others."""
    config = replace(TINY_EXPERTS, intermediate_size=32, layer_types=("linear_attention",))
    run = InStep(
        random_model(config, torch.float32),
        random_model(config, torch.float32, DEVICE),
        LIMITS,
        adapters=2,
        options=RunnerOptions(batch_invariant=batch_invariant),
    )
    run.run(requests(3, 2, 4, tokens=2, adapters=(2, 0, 1)))
    assert run.steps == 2


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_quantized_experts(kind: str) -> None:
    """Few rows: weights alone are quantized, so the answer is that of their decoded numbers."""
    fused = random_model(QUANTIZABLE, torch.float32, DEVICE, quantization=kind)
    run = InStep(decoded(fused), fused, LIMITS)
    run.run(requests(3, 2, tokens=2))
    assert run.steps == 2


@pytest.mark.thorough
def test_the_mtp_layer_has_experts() -> None:
    limits = replace(LIMITS, token_budget=16, draft_tokens=2)
    models = (random_model(TINY_EXPERTS, torch.float32, device, mtp=True) for device in ("cpu", DEVICE))
    run = InStep(*models, limits)
    run.run(requests(2, 6, tokens=3))
    assert run.steps >= 2
    assert run.drafts >= 2
