"""Training in float8: the products against float64, the trunk with them against the same rounding in torch, and how far
the gradients are from those of the model's own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.gpu.launch.device import limits_of
from kernels.gpu.linear.fp8 import quantize_rows
from kernels.quantize import dequantize_fp8, unpair
from services.common.jobs import LoraSettings
from services.engine.models.footprint import Formats, Quantization, Storage, float8_training_bytes
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.training import trunk
from services.engine.models.qwen3_5.training.frozen import Float8Linear, FrozenLinear, FrozenLinears
from services.engine.models.weights.matrix import DenseMatrix
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.parity.fused_models import TINY, TINY_EXPERTS, random_model
from tests.parity.test_gradients import gradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "rotary_dim": 16, "linear_value_dim": 64}
WIDE, EXPERTS = replace(TINY, **SIZES), replace(TINY_EXPERTS, **SIZES)
"""Inputs are multiples of 128; a DeltaNet mixer has 292 outputs."""
LENGTHS = [5, 3]


def rounded(x: Tensor) -> Tensor:
    """[T, in] as the product sees it, in float64."""
    values, scale = quantize_rows(x)
    return unpair(values.float()).double() * scale[:, None]


@dataclass
class Decoded:
    """The same products on decoded factors, in float64. Implements FrozenLinear."""

    linear: Float8Linear

    def product(self, x: Tensor, addend: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        found = rounded(x) @ dequantize_fp8(self.linear.forward, torch.float64).t()
        return self._added(found, x, addend if addend is None or in_place else addend.clone())

    def input_grad(self, grad: Tensor, addend: Tensor | None = None) -> Tensor:
        whole = self.linear.backward.shape[1]
        found = rounded(grad[:, :whole]) @ dequantize_fp8(self.linear.backward, torch.float64).t()
        if self.linear.rest is not None:
            found += grad[:, whole:].double() @ self.linear.rest.double()
        return self._added(found, grad, addend)

    def _added(self, found: Tensor, x: Tensor, addend: Tensor | None) -> Tensor:
        return found.to(x.dtype) if addend is None else addend.copy_(found + addend)


@pytest.mark.parametrize("out", [256, 292])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_both_directions(out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(out)
    weight = (torch.randn(out, 128, device=DEVICE) / 11).to(dtype)
    linear = Float8Linear.of(DenseMatrix(weight), limits_of(DEVICE))
    assert (linear.rest is None) == (out == 256)
    decoded = Decoded(linear)
    x, grad = (torch.randn(9, size, device=DEVICE).to(dtype) for size in (128, out))
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 2e-3}
    torch.testing.assert_close(linear.product(x), decoded.product(x), **close)
    torch.testing.assert_close(linear.input_grad(grad), decoded.input_grad(grad), **close)
    # e4m3 keeps four bits of each factor.
    error = (linear.product(x).double() - x.double() @ weight.double().t()).norm() / (
        x.double() @ weight.double().t()
    ).norm()
    assert 0.005 < error < 0.06

    stream = torch.randn(9, out, device=DEVICE).to(dtype)
    kept, expected = stream.clone(), decoded.product(x, stream)
    torch.testing.assert_close(linear.product(x, stream), expected, **close)
    assert torch.equal(stream, kept), "a residual stream is read again by the backward"
    assert linear.product(x, stream, in_place=True) is stream
    torch.testing.assert_close(stream, expected, **close)
    into = torch.randn(9, 128, device=DEVICE).to(dtype)
    expected = decoded.input_grad(grad, into.clone())
    assert linear.input_grad(grad, into) is into
    torch.testing.assert_close(into, expected, **close)


def linears(model: Qwen3_5) -> list[FrozenLinears]:
    return [FrozenLinears.float8(layer, limits_of(DEVICE)) for layer in model.weights.layers]


def in_torch(layer: FrozenLinears) -> FrozenLinears:
    def decoded(linear: FrozenLinear) -> FrozenLinear:
        assert isinstance(linear, Float8Linear)
        return Decoded(linear)

    return FrozenLinears(*map(decoded, (layer.mixer_in, layer.mixer_out, layer.gate_up, layer.down)))


def trained(
    model: Qwen3_5, lora: LoraParams, products: Sequence[FrozenLinears] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and gradients of something that weighs them differently."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(model.config.vocab_size, (sum(LENGTHS),), generator=generator).to(DEVICE)
    weights = torch.randn(sum(LENGTHS), model.config.hidden_size, generator=generator).to(DEVICE)
    hidden = trunk.forward_packed(
        tokens,
        LENGTHS,
        model.config,
        model.weights,
        model.rotation,
        lora,
        recompute="none",
        give_way=lambda: None,
        linears=products,
    )
    (hidden * weights).sum().backward()
    return hidden.detach(), {name: value.clone() for name, value in gradients(lora).items()}


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("config", "most"),
    [pytest.param(WIDE, 0.12, id="dense"), pytest.param(EXPERTS, 0.3, id="experts", marks=pytest.mark.thorough)],
)
def test_gradients(config: Qwen3_5Config, most: float) -> None:
    """A router that sees other inputs may choose another expert, which is another gradient."""
    model = random_model(config, torch.float32, DEVICE)
    lora = LoraParams.create(model.config, LoraSettings(rank=3), device=DEVICE)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.normal_(0, 0.15, generator=torch.Generator(DEVICE).manual_seed(len(parameter)))
    products = linears(model)
    hidden, found = trained(model, lora, products)
    same, expected = trained(model, lora, [in_torch(layer) for layer in products])
    exact, gradient = trained(model, lora, None)
    # A sum that is rounded otherwise may fall on another number of four bits.
    assert apart(hidden, same) <= 0.02
    assert 0.005 < apart(hidden, exact) < 0.15
    for name, value in found.items():
        assert apart(value, expected[name]) <= 0.03, name
    errors = [apart(value, gradient[name]) for name, value in found.items()]
    assert 0.005 < sum(errors) / len(errors) < most


def test_a_model_that_trains_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own forward takes the copies, teachers and references as well."""
    model = random_model(WIDE, torch.float32, DEVICE)
    seen: list[object] = []
    monkeypatch.setattr(Qwen3_5, "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(trunk, "forward_packed", lambda *_, **given: seen.append(given["linears"]) or torch.zeros(1))
    given = {"recompute": "none", "give_way": lambda: None}
    model.forward_train(torch.zeros(1), [1], None, **given)  # type: ignore[arg-type]
    monkeypatch.setattr(model, "kernel_configs", lambda: type("Configs", (), {"device": limits_of(DEVICE)}))
    model.train_in_float8()
    model.forward_train(torch.zeros(1), [1], None, **given)  # type: ignore[arg-type]
    assert seen[0] is None
    assert isinstance(seen[1], tuple)
    assert len(seen[1]) == model.config.num_layers


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_bytes_of_the_copies(quantization: Quantization) -> None:
    model = random_model(WIDE, torch.bfloat16, quantization=quantization)
    counted = 0
    for layer in linears(model):
        for linear in (layer.mixer_in, layer.mixer_out, layer.gate_up, layer.down):
            assert isinstance(linear, Float8Linear)
            own = [*linear.backward.tensors(), *(() if linear.rest is None else (linear.rest,))]
            own += linear.forward.tensors() if quantization != "fp8" else ()
            counted += sum(tensor.nbytes for tensor in own)
    assert counted == float8_training_bytes(WIDE, Formats(2, Storage(quantization)))
