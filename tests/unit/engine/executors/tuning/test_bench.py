"""The steps that are measured, in Triton's interpreter: nothing is captured there, but all else is the GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

import tests.kernels.gpu.interpreter  # noqa: F401
from kernels.gpu.configs import KernelConfigs, Product, Tuned
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from services.engine.executors.cuda.runner import CudaRunner, RunnerLimits
from services.engine.executors.tuning.bench import CapturedSteps
from services.engine.executors.tuning.choice import Choice, put
from services.engine.models.device_batch import DeviceCache
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5
from tests.parity.fused_models import TINY, random_model

ROWS = 2
CONTEXT = 40


class Interpreted:
    """Takes the place of the compilers: the interpreter has none."""

    def begin(self, launch: Any) -> list[Any]:
        launch()
        return []


def steps(model: Qwen3_5, kv_dtype: torch.dtype | None = None) -> tuple[CapturedSteps, KernelConfigs, DeviceCache]:
    lora = LoraSlots(model.config, 3, 4, model.dtype, model.device)
    cache = DeviceCache.allocate(
        model.config, model.dtype, model.device, num_blocks=4, block_size=16, num_slots=3, kv_dtype=kv_dtype
    )
    limits = RunnerLimits(max_num_seqs=ROWS, token_budget=80, max_model_len=CONTEXT, largest_graph=ROWS)
    runner = CudaRunner(model, cache, lora, limits, eos_token_ids=[0])
    kernels = model.kernel_configs()
    return (
        CapturedSteps(runner, kernels, cache, lora, cast("Any", Interpreted()), max_model_len=CONTEXT),
        kernels,
        cache,
    )


@pytest.mark.thorough
def test_candidates_are_compared_with_the_table_and_leave_nothing_behind() -> None:
    model = random_model(TINY, torch.float32, kernels=KernelConfigs.on(torch.device("cpu")))
    bench, kernels, cache = steps(model)
    (asked,) = bench.prepare([ROWS]).values()
    products = {product for product, _ in asked}
    config = model.config
    assert Product("none", 2 * config.intermediate_size, config.hidden_size) in products
    assert Product("none", config.vocab_size, config.hidden_size) in products
    choice: Choice = {max(products): SkinnyConfig("dot", 32, 128, 4, stages=2)}
    assert bench.difference(ROWS, choice) < 1e-5
    assert kernels.tuned.products == {(max(products), ROWS): SkinnyConfig("dot", 32, 128, 4, stages=2)}

    def wrong(tuned: Tuned, rows: Sequence[int], choice: Choice) -> None:
        put(tuned, rows, choice)
        if choice:
            model.weights.final_norm.mul_(2)

    with patch("services.engine.executors.tuning.bench.put", wrong):
        assert bench.difference(ROWS, choice) == pytest.approx(1)
    bench.close()
    for pool in (cache.recurrent, cache.conv, cache.stacked.pages.view(torch.uint8)):
        assert not pool.any()


def test_the_same_numbers_fill_the_caches_each_time() -> None:
    model = random_model(TINY, torch.float32, kernels=KernelConfigs.on(torch.device("cpu")))
    bench, _, cache = steps(model, torch.float8_e4m3fn)
    filled = []
    for _ in range(2):
        bench._fill(ROWS)
        filled.append([pool.clone() for pool in (cache.recurrent, cache.conv, cache.pages[0].keys.view(torch.uint8))])
        cache.recurrent.zero_()
    for first, second in zip(*filled, strict=True):
        assert first.any()
        assert torch.equal(first, second)
    # Nobody's: scratch.
    assert not cache.recurrent[:, 0].any()
    keys, _ = cache.pages[0].dense()
    assert keys[1:].std() == pytest.approx(1, rel=0.1)
