"""Matrices: one product, whatever the storage and the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.linear.skinny import MAX_ROWS, Convolution, Norm, SplitWorkspace
from services.common.errors import InvalidRequest
from services.engine.models.residual import Residual
from services.engine.models.weights.matrix import Matrix, quantize
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.lora.support import random_rows

MANY = MAX_ROWS + 6
KINDS = ["none", "fp8", "int4"]


def exact(x: Tensor, weight: Tensor, norm: Norm | None, residual: Tensor | None, swiglu: bool) -> Tensor:
    y = x.double()
    if norm is not None:
        y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    y = y @ weight.double().t()
    if swiglu:
        gate, up = y.chunk(2, -1)
        y = gate * gate.sigmoid() * up
    return y if residual is None else y + residual.double()


def assert_close(got: Tensor, expected: Tensor, kind: str, rows: int) -> None:
    # Many rows of an fp8 matrix are quantized too.
    bound = 0.05 if kind == "fp8" and rows == MANY else 1e-4
    assert (got.double() - expected).abs().max() < bound * expected.abs().max()


def matrix(kind: str, device: torch.device, *, invariant: bool = False) -> Matrix:
    weight = torch.randn(96, 256, device=device) / 16
    return quantize(weight, kind, workspace=SplitWorkspace.allocate(device), invariant=invariant)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, MANY])
@pytest.mark.parametrize("swiglu", [False, True])
def test_project(device: torch.device, kind: str, rows: int, swiglu: bool) -> None:
    torch.manual_seed(1)
    stored = matrix(kind, device)
    x = torch.randn(rows, 256, device=device)
    norm = Norm(torch.rand(256, device=device) + 0.5, 1e-6)
    expected = exact(x, stored.dense(), norm, None, swiglu)
    before = x.clone()
    out = stored.project(x, norm=norm, swiglu=swiglu)
    assert_close(out, expected, kind, rows)
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, MANY])
def test_products_onto_the_residual_stream(device: torch.device, kind: str, rows: int) -> None:
    """Whoever reads the stream next finds the product in it, at once or when it has been read through a norm."""
    torch.manual_seed(2)
    stored, reader = matrix(kind, device), quantize(torch.randn(64, 96, device=device) / 10, "none")
    start, x = torch.randn(rows, 96, device=device), torch.randn(rows, 256, device=device)
    norm = Norm(torch.rand(96, device=device) + 0.5, 1e-6)
    expected = exact(x, stored.dense(), None, start, swiglu=False)

    settled = Residual(start.clone())
    stored.add_to(settled, x)
    assert_close(settled.settled(), expected, kind, rows)
    assert torch.equal(settled.settled(), settled.settled())

    read = Residual(start.clone())
    stored.add_to(read, x)
    through = reader.project(read, norm=norm)
    assert torch.equal(read.settled(), settled.settled())
    assert_close(through, exact(settled.settled(), reader.dense(), norm, None, swiglu=False), "none", rows)

    ready = Residual(start.clone())
    stored.add_to(ready, x, ahead=(norm, reader))
    through = reader.project(ready, norm=norm)
    assert torch.equal(ready.settled(), settled.settled())
    assert_close(through, exact(settled.settled(), reader.dense(), norm, None, swiglu=False), "none", rows)
    other = Norm(torch.rand(96, device=device) + 0.5, 1e-6)
    through = reader.project(ready, norm=other)
    assert_close(through, exact(settled.settled(), reader.dense(), other, None, swiglu=False), "none", rows)

    stored.add_to(read, x)
    stored.add_to(read, x)
    thrice = exact(x, stored.dense(), None, None, swiglu=False) * 3 + start.double()
    assert_close(read.settled(), thrice, kind, rows)


def test_a_residual_stream_of_many_rows_is_read_through_a_norm(device: torch.device) -> None:
    stored, stream = matrix("none", device), Residual(torch.zeros(MANY, 256, device=device))
    stream.leave(torch.ones(MANY, 256, device=device))
    with pytest.raises(ValueError, match="norm"):
        stored.project(stream)


def test_a_wide_product_in_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, x = matrix("none", device), torch.randn(MANY, 256, device=device)
    whole = stored.project(x)
    monkeypatch.setattr("services.engine.models.weights.matrix._PIECE", 7)
    monkeypatch.setattr("services.engine.models.weights.matrix._WIDE", stored.shape[0])
    torch.testing.assert_close(stored.project(x), whole)


@pytest.mark.parametrize("rows", [3, MANY])
def test_adapters(device: torch.device, rows: int) -> None:
    torch.manual_seed(2)
    stored = matrix("none", device)
    x = torch.randn(rows, 256, device=device)
    slots = [index % 3 for index in range(rows)]
    lora = random_rows(slots, [0, 16, 16], (96,), 256, device)
    norm = Norm(torch.rand(256, device=device) + 0.5, 1e-6)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    expected = normed @ stored.dense().double().t()
    for row, slot in enumerate(slots):
        if slot:
            expected[row] += lora.b[slot].double().t() @ (lora.a[slot, 0].double() @ normed[row])
    out = stored.project(x, norm=norm, lora=lora)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_rows_do_not_depend_on_their_number(device: torch.device, kind: str) -> None:
    stored = matrix(kind, device, invariant=True)
    x = torch.randn(MANY, 256, device=device).to(torch.float32)
    norm = Norm(torch.ones(256, device=device), 1e-6)
    together = stored.project(x, norm=norm)
    for begin, end in ((0, 1), (3, 20), (MANY - 2, MANY)):
        assert torch.equal(stored.project(x[begin:end], norm=norm), together[begin:end])


def test_an_invariant_stream_is_made_ready_alike_for_any_number_of_rows(device: torch.device) -> None:
    first = matrix("none", device, invariant=True)
    second = quantize(torch.randn(64, 96, device=device), "none", invariant=True)
    x, start = torch.randn(MANY, 256, device=device), torch.randn(MANY, 96, device=device)
    norm = Norm(torch.rand(96, device=device) + 0.5, 1e-6)

    def through(begin: int, end: int) -> Tensor:
        stream = Residual(start[begin:end].clone())
        first.add_to(stream, x[begin:end], ahead=(norm, second))
        return second.project(stream, norm=norm)

    together = through(0, MANY)
    for begin, end in ((0, 1), (3, 20), (MANY - 2, MANY)):
        assert torch.equal(through(begin, end), together[begin:end])


def test_many_rows_refuse_a_convolution(device: torch.device) -> None:
    stored = matrix("none", device)
    assert stored.convolves(2)
    assert not stored.convolves(MANY)
    slots = torch.ones(MANY, dtype=torch.int32, device=device)
    conv = Convolution(torch.zeros(2, 3, 32, device=device), torch.zeros(4, 32, device=device), slots)
    with pytest.raises(ValueError, match="does not convolve"):
        stored.project(torch.zeros(MANY, 256, device=device), conv=conv)


def test_sizes(device: torch.device) -> None:
    for kind, bits in (("none", 32), ("fp8", 8), ("int4", 4)):
        stored = matrix(kind, device)
        assert stored.shape == (96, 256)
        assert 96 * 256 * bits // 8 <= stored.nbytes <= 1.1 * 96 * 256 * bits // 8
        assert stored.dense().shape == (96, 256)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="none, fp8 or int4"):
        quantize(torch.zeros(4, 128), "int3")
    for kind in ("fp8", "int4"):
        with pytest.raises(InvalidRequest, match="multiple"):
            quantize(torch.zeros(4, 100), kind)
