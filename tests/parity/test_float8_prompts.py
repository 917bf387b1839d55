"""Prompts whose products are in float8 beside decodes in the model's dtype: the fused forward against the plain one,
which rounds as much, and decodes that do not notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.kernels.gpu.interpreter  # noqa: F401
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.weights.prompts import NONE, PromptProducts
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from tests.parity.fused_models import TINY, TINY_EXPERTS, random_model
from tests.parity.in_step import InStep
from tests.parity.test_fused import DEVICE, requests
from tests.parity.test_fused import LIMITS as USUAL
from tests.parity.test_scheduled_generation import serve

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "rotary_dim": 16, "linear_value_dim": 64}
WIDE, EXPERTS = replace(TINY, **SIZES), replace(TINY_EXPERTS, **SIZES)
LIMITS = replace(USUAL, prefix_cache=False)
ALL = PromptProducts.parse("all", rows=66)
"""Of more rows than the products of few rows take, which would not round them."""
EXACT_SUMS = 2e-4
"""Largest error of these logits where sums of float8 products are exact, as those of a CPU are."""


def last_rows(products: PromptProducts, asked: Sequence[Request], *, graphs: int = 0) -> tuple[Tensor, Tensor]:
    """Sampled rows of the last step ahead of the head, one request arriving a step: of the fused and plain forward.

    Args:
        graphs: largest decode that a warm-up would capture; there is none.
    """
    models = [random_model(WIDE, torch.float32, device, prompts=products) for device in ("cpu", DEVICE)]
    run = InStep(models[0], models[1], LIMITS, tolerance=float("inf"), largest_graph=graphs)
    seen: dict[int, Tensor] = {}

    def watch(forward: Any, number: int) -> None:
        logits = forward.logits

        def watched(x: Tensor) -> Tensor:
            seen[number] = x.clone().cpu()
            found: Tensor = logits(x)
            return found

        forward.logits = watched

    watch(run.runner.forward, 0)
    watch(models[0], 1)
    run.run(asked, arrivals=1)
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("text", "config", "adapters"),
    [
        pytest.param("all", WIDE, 0, id="all"),
        pytest.param("mlp:0-0,attention", WIDE, 2, id="some, adapters"),
        pytest.param("all", EXPERTS, 0, id="experts", marks=pytest.mark.thorough),
    ],
)
def test_as_the_plain_forward(text: str, config: Qwen3_5Config, adapters: int) -> None:
    """A prompt, its decode beside another prompt, and decodes alone. The plain forward takes over which numbers ours
    rounded up and which down, and computes in float64. What is left is the error of sums: of float8 tensor cores, which
    keep some 14 bits, a hundredth of what the roundings move the logits by."""
    products = PromptProducts.parse(text, rows=66)

    def run(expected: PromptProducts, tolerance: float, follows: float | None) -> InStep:
        plain = random_model(config, torch.float64, "cpu", prompts=expected)
        fused = random_model(config, torch.float32, DEVICE, prompts=products)
        both = InStep(plain, fused, LIMITS, adapters=adapters, tolerance=tolerance, follows=follows)
        both.run(requests(67, 70, tokens=2, adapters=(2, 1) if adapters else ()), arrivals=1)
        assert both.steps == 3
        return both

    exact = DEVICE.type == "cpu"
    tolerance = EXACT_SUMS if exact else 0.01 * max(run(NONE, float("inf"), follows=None).errors)
    run(products, tolerance, follows=1.01)


def test_decodes_do_not_depend_on_the_prompts_beside_them() -> None:
    """A decode beside a prompt gets, bit for bit, what it gets alone, and so does the prompt: its products alone are in
    float8."""
    first, second = requests(67, 70, tokens=2)
    second = replace(second, sampling=replace(second.sampling, max_tokens=1))
    both = last_rows(ALL, [first, second])
    decode, prompt = (last_rows(ALL, [request]) for request in (first, second))
    exact = last_rows(NONE, [second])
    for found, alone, other, plain in zip(both, decode, prompt, exact, strict=True):
        assert torch.equal(found, torch.cat((alone, other)))
        assert 0.01 < (other - plain).norm() / plain.norm() < 0.6


def test_prompts_beside_decodes_are_as_without_where_no_graph_holds_them() -> None:
    """Their launches would take a host longer than the products save a card. Prompts alone stay in float8."""
    first, second = requests(67, 70, tokens=2)
    second = replace(second, sampling=replace(second.sampling, max_tokens=1))
    mixed, alone = ([first, second], [second])
    ours, _ = last_rows(ALL, mixed, graphs=8)
    assert torch.equal(ours[1], last_rows(NONE, mixed)[0][1])
    assert torch.equal(last_rows(ALL, alone, graphs=8)[0], last_rows(ALL, alone)[0])


def test_fewer_rows_are_computed_as_without() -> None:
    asked = requests(65, 65, tokens=2)
    for ours, without in zip(last_rows(ALL, asked), last_rows(NONE, asked), strict=True):
        assert torch.equal(ours, without)


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_draft_tokens_are_checked_as_decodes_are(draft_tokens: int) -> None:
    """On a CPU, where a row of a prompt is enough here. Rows with draft tokens are of no prompt: tokens and their
    probabilities are those without."""
    model = random_model(WIDE, torch.float32, mtp=True, prompts=PromptProducts.parse("all"))
    generator = torch.Generator().manual_seed(4)
    prompts = [tuple(torch.randint(6, 61, (length,), generator=generator).tolist()) for length in (5, 30, 17, 9)]
    sampling = [SamplingParams(max_tokens=12, temperature=0.0), SamplingParams(max_tokens=12, seed=3)]
    asked = [Request(f"r{n}", prompt, sampling[n % 2], arrival=n) for n, prompt in enumerate(prompts)]
    lora = LoraSlots(model.config, 1, 4, model.dtype, model.device)
    plain, drafted = (
        serve(model, asked, arrivals=9, lora=lora, token_budget=96, prefix_cache=False, draft_tokens=count)[0]
        for count in (0, draft_tokens)
    )
    for mine, theirs in zip(drafted, plain, strict=True):
        assert list(mine.output_ids) == list(theirs.output_ids)
        assert torch.tensor(mine.sampling_logprobs).sub(torch.tensor(theirs.sampling_logprobs)).abs().max() < 1e-4
