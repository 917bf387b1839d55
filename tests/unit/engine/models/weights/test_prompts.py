"""Which products of prompts are computed in float8: the setting's grammar, what a model refuses, and the product."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from kernels.quantize import multiply_fp8, quantize_fp8
from services.common.errors import InvalidRequest
from services.engine.models.footprint import Formats, Storage, float8_prompt_bytes, float8_training_bytes
from services.engine.models.qwen3_5.training.frozen import Float8Linear
from services.engine.models.weights.matrix import DenseMatrix, quantize
from services.engine.models.weights.prompts import PRODUCTS, PromptProducts
from services.engine.settings import EngineSettings
from tests.parity.fused_models import TINY, TINY_EXPERTS, random_model

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "rotary_dim": 16, "linear_value_dim": 64}
WIDE = replace(TINY, **SIZES)
"""A DeltaNet layer and one of full attention."""


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("none", set(), set()),
        ("", set(), set()),
        ("all", set(PRODUCTS), set(PRODUCTS)),
        ("mlp", {"mlp"}, {"mlp"}),
        (" attention , mlp:0-0 ", {"attention", "mlp"}, {"attention"}),
        ("all:1-1,linear_attention", {"linear_attention"}, set(PRODUCTS)),
    ],
)
def test_grammar(text: str, first: set[str], second: set[str]) -> None:
    products = PromptProducts.parse(text)
    assert (products.of_layer(0), products.of_layer(1)) == (first, second)
    assert bool(products) == bool(first | second)
    assert PromptProducts.parse(str(products)) == products
    assert EngineSettings(prefill_float8=text).prefill_float8 == str(products)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mpl", "'mpl' names no products: use none, all, or some of mlp, attention, linear_attention"),
        ("mlp,", "'' names no products"),
        ("mlp,none", "'none' names no products"),
        ("mlp:3", "'mlp:3' names no products"),
        ("mlp:3-1", "'mlp:3-1': layer 3 is behind layer 1; write mlp:1-3"),
        ("mlp:-1", "names no products"),
        ("MLP", "names no products"),
    ],
)
def test_other_texts_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(says)):
        EngineSettings(prefill_float8=text)


def test_fixed_cuts_are_refused() -> None:
    with pytest.raises(ValidationError, match="batch_invariant and prefill_float8 contradict each other"):
        EngineSettings(prefill_float8="all", batch_invariant=True)


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        (Storage(prompts=PromptProducts.parse("mlp:0-2")), "2 layers, 0 to 1, and mlp:0-2 goes on behind"),
        (Storage(prompts=PromptProducts.parse("mlp,attention:0-0")), "no layer of the model has products of attention"),
        (Storage("fp8", prompts=PromptProducts.parse("mlp")), "these are fp8.*set it to none"),
        (Storage("int4", prompts=PromptProducts.parse("mlp")), "these are int4.*TEMPER_QUANTIZATION=none"),
    ],
)  # fmt: skip
def test_what_a_model_refuses(storage: Storage, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        storage.check(WIDE)
    assert caught.value.param == "prefill_float8"


def test_inputs_that_cannot_be_paired_are_refused() -> None:
    Storage(prompts=PromptProducts.parse("mlp")).check(WIDE)
    narrow = replace(WIDE, intermediate_size=48)
    Storage(prompts=PromptProducts.parse("attention")).check(narrow)
    with pytest.raises(InvalidRequest, match="multiples of 128, those of down of layer 0 are 48: leave them out"):
        Storage(prompts=PromptProducts.parse("mlp")).check(narrow)


@pytest.mark.parametrize("text", ["all", "mlp", "attention", "linear_attention:0-0", "all:1-1"])
@pytest.mark.parametrize("config", [WIDE, replace(TINY_EXPERTS, **SIZES)], ids=["dense", "experts"])
def test_bytes_of_the_copies(config: object, text: str) -> None:
    """Counted from the config, and made; training adds to them what is not there yet, and shares what is."""
    assert isinstance(config, type(WIDE))
    products = PromptProducts.parse(text)
    model = random_model(config, torch.bfloat16, prompts=products)
    copies = [
        matrix.float8.nbytes
        for layer in model.weights.layers
        for matrix in (layer.mixer.in_proj, layer.mixer.out_proj, layer.gate_up, layer.down)
        if isinstance(matrix, DenseMatrix) and matrix.float8 is not None
    ]
    with_copies, without = Formats(2, Storage(prompts=products)), Formats(2)
    assert sum(copies) == float8_prompt_bytes(config, with_copies) > 0
    assert model.weights.nbytes() == random_model(config, torch.bfloat16).weights.nbytes()
    more = float8_training_bytes(config, with_copies)
    assert more + sum(copies) == float8_training_bytes(config, without)


def test_training_takes_the_same_copy() -> None:
    matrix = quantize(torch.randn(128, 128).bfloat16(), "none", prompts=True)
    assert isinstance(matrix, DenseMatrix)
    assert matrix.float8 is not None
    made = Float8Linear.of(matrix, None)  # type: ignore[arg-type]
    assert made.forward is matrix.float8.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_that_of_rounding_to_e4m3(dtype: torch.dtype) -> None:
    """Each factor keeps four bits: it is within 2^-4 of itself, or half a least step, 2^-10 of its row's scale."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(33, 256, generator=generator) * torch.logspace(-3, 3, 33)[:, None]).to(dtype)
    weight = torch.randn(40, 256, generator=generator).to(dtype)
    exact = x.double() @ weight.double().t()
    found = multiply_fp8(x, quantize_fp8(weight))
    assert found.dtype == dtype
    rows, columns = x.double().abs(), weight.double().abs()

    def error(size: torch.Tensor) -> torch.Tensor:
        return 2**-4 * size + 2**-10 * size.amax(1, keepdim=True) / 448

    bound = error(rows) @ columns.t() + rows @ error(columns).t() + error(rows) @ error(columns).t()
    own = torch.finfo(dtype).eps * (rows @ columns.t())
    assert ((found.double() - exact).abs() <= bound + own).all()
    assert 0.02 < (found.double() - exact).norm() / exact.norm() < 0.05
