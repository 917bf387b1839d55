"""The GPU's forwards with the ratios of every dense size and a lengthened context: serving beside the plain runner, and
training's gradients beside plain autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tests.kernels.gpu.interpreter  # noqa: F401
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.rope import Yarn
from services.engine.models.qwen3_5.training import plain, trunk
from tests.parity.family import DENSE
from tests.parity.fused_models import TINY, random_adapter, random_model
from tests.parity.in_step import InStep
from tests.parity.test_fused import DEVICE, LIMITS, requests
from tests.parity.test_gradients import assert_equal_gradients, gradients

YARN = Yarn(4.0, original_context=32, beta_fast=2.0, beta_slow=1.0, truncate=False, attention_factor=1.14)
RATIOS = {
    (
        true["num_attention_heads"] // true["num_key_value_heads"],
        true["linear_num_value_heads"] // true["linear_num_key_heads"],
    ): size
    for size, true in DENSE.items()
}
"""(query heads a key head, value heads a key head) → a size that has them."""
ratios = pytest.mark.parametrize("ratio", RATIOS, ids=RATIOS.values())


def config_of(ratio: tuple[int, int]) -> Qwen3_5Config:
    return replace(TINY, num_heads=ratio[0], linear_value_heads=ratio[1], yarn=YARN)


@pytest.mark.sampled(1)
@ratios
def test_serving(ratio: tuple[int, int]) -> None:
    """Prompts of more than a tile, decodes and steps of both, with adapters."""
    config = config_of(ratio)
    run = InStep(
        random_model(config, torch.float32),
        random_model(config, torch.float32, DEVICE),
        LIMITS,
        pending=True,
        adapters=2,
    )
    run.run(requests(1, 66, 5, tokens=2, adapters=(1, 0, 2)), arrivals=1)
    assert run.steps == 4


@pytest.mark.sampled(1)
@ratios
def test_training(ratio: tuple[int, int]) -> None:
    config = config_of(ratio)
    bound = random_adapter(config, 3, seed=1)
    lengths = [40, 2, 7]
    tokens = torch.randint(6, 61, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    found = []
    for device, forward in ((torch.device("cpu"), plain.forward_packed), (DEVICE, trunk.forward_packed)):
        model, lora = random_model(config, torch.float32, device), LoraParams.from_bound(bound, device=device)
        hidden = forward(
            tokens.to(device),
            lengths,
            config,
            model.weights,
            model.rotation,
            lora,
            recompute="none",
            give_way=lambda: None,
        )
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(device)
        (hidden * weights).sum().backward()
        found.append((hidden.detach().cpu(), {name: grad.cpu() for name, grad in gradients(lora).items()}))
    (exact, expected), (ours, mine) = found
    assert (ours - exact).abs().max() <= 2e-4
    assert_equal_gradients(mine, expected)
