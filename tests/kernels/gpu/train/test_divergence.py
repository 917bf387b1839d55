"""The divergence in Triton against TRL's formula in float64, and against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import divergence as plain
from kernels.gpu.train.divergence import divergence
from tests.kernels.divergence_support import generalized_jsd
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.train.support import relative

BARS = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Relative errors of whole tensors. The logits of a bfloat16 model are off by 2⁻⁹ of themselves, and a divergence is a
difference of them."""


def normal(*shape: int, seed: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocabulary", "tile"), [(50, 4), (5000, 100)])
def test_divergence(
    device: torch.device, dtype: torch.dtype, beta: float, temperature: float, vocabulary: int, tile: int
) -> None:
    hidden = normal(11, 24, seed=0, device=device, scale=0.2).to(dtype).requires_grad_()
    head = normal(vocabulary, 24, seed=1, device=device).to(dtype)
    taught = normal(11, 40, seed=2, device=device, scale=0.2).to(dtype)
    # Wider than the vocabulary: the heads of both sides are what they have in common of larger ones.
    teacher_head = normal(vocabulary + 3, 40, seed=3, device=device).to(dtype)[:vocabulary]
    upstream = normal(11, seed=4, device=device)
    hidden64 = hidden.detach().double().requires_grad_()
    logits64, teacher64 = hidden64 @ head.double().t(), taught.double() @ teacher_head.double().t()
    expected = generalized_jsd(logits64, teacher64, beta, temperature)
    (slope,) = torch.autograd.grad(expected, hidden64, upstream.double(), retain_graph=True)
    found = divergence(hidden, head, taught, teacher_head, beta=beta, temperature=temperature, tile=tile)
    (ours,) = torch.autograd.grad(found.value, hidden, upstream)
    assert relative(found.value.detach(), expected.detach()) <= BARS[dtype]
    kl = generalized_jsd(logits64.detach(), teacher64, 1.0, temperature)
    assert relative(found.student_kl, kl) <= BARS[dtype]
    assert relative(ours, slope) <= BARS[dtype]
    rows = torch.nn.functional.linear
    same = rows(hidden, head).argmax(-1) == rows(taught, teacher_head).argmax(-1)
    assert torch.equal(found.agreed, same)
    assert not found.agreed.requires_grad
    with torch.no_grad():
        again = divergence(hidden, head, taught, teacher_head, beta=beta, temperature=temperature, tile=tile)
    assert torch.equal(again.value, found.value.detach())
    assert not again.value.requires_grad


def test_equals_the_plain_one(device: torch.device) -> None:
    hidden, head = normal(9, 16, seed=0, device=device), normal(70, 16, seed=1, device=device)
    taught, teacher_head = normal(9, 8, seed=2, device=device), normal(70, 8, seed=3, device=device)
    for beta in (0.0, 0.3, 1.0):
        ours = divergence(hidden, head, taught, teacher_head, beta=beta, temperature=1.3)
        reference = plain.divergence(hidden, head, taught, teacher_head, beta=beta, temperature=1.3)
        torch.testing.assert_close(ours.value, reference.value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.student_kl, reference.student_kl, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours.agreed, reference.agreed)


def test_of_equal_logits_the_first_counts(device: torch.device) -> None:
    """Ties within a lane, between lanes and between blocks."""
    width = 5000
    hidden = torch.eye(3, device=device)
    head, teacher_head = torch.zeros(width, 3, device=device), torch.zeros(width, 3, device=device)
    head[[4500, 17, 2065], 0] = 2.0
    teacher_head[17, 0] = 1.0
    head[[3000, 952], 1] = 2.0
    teacher_head[3000, 1] = 1.0
    head[:, 2] = -1.0
    teacher_head[:, 2] = -2.0
    found = divergence(hidden, head, hidden, teacher_head, beta=0.5, temperature=1.0)
    assert found.agreed.tolist() == [True, False, True]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distributions_that_have_nothing_in_common(device: torch.device, beta: float) -> None:
    head = torch.tensor([[200.0], [0.0], [-200.0]], device=device)
    hidden = torch.ones(1, 1, device=device, requires_grad=True)
    found = divergence(hidden, head, torch.ones(1, 1, device=device), -head, beta=beta, temperature=1.0)
    (slope,) = torch.autograd.grad(found.value.sum(), hidden)
    hidden64 = hidden.detach().double().requires_grad_()
    expected = generalized_jsd(hidden64 @ head.double().t(), -head.double().t(), beta, 1.0)
    (exact,) = torch.autograd.grad(expected.sum(), hidden64)
    assert float(found.value.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(slope) == pytest.approx(float(exact), rel=1e-4, abs=1e-4)


def test_refused(device: torch.device) -> None:
    hidden, head = normal(2, 4, seed=0, device=device), normal(5, 4, seed=1, device=device)
    with pytest.raises(ValueError, match="beta must be between 0 and 1"):
        divergence(hidden, head, hidden, head, beta=2.0, temperature=1.0)
