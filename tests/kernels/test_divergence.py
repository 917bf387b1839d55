"""The divergence of two models' distributions against TRL's formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.divergence import TILE, divergence, divergence_rows
from tests.kernels.divergence_support import generalized_jsd

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rows", [1, TILE + 3])
def test_value_and_gradient(beta: float, temperature: float, rows: int) -> None:
    hidden, head = normal(rows, 24, seed=0), normal(90, 24, seed=1, scale=0.5)
    taught, teacher_head = normal(rows, 40, seed=2), normal(90, 40, seed=3, scale=0.4)
    upstream = normal(rows, seed=4)
    student64 = hidden.double().requires_grad_()
    teacher64 = taught.double() @ teacher_head.double().t()
    expected = generalized_jsd(student64 @ head.double().t(), teacher64, beta, temperature)
    (slope,) = torch.autograd.grad(expected, student64, upstream.double())
    hidden.requires_grad_()
    teacher_hidden = taught.requires_grad_()
    found = divergence(hidden, head, teacher_hidden, teacher_head, beta=beta, temperature=temperature)
    torch.testing.assert_close(found.value.double(), expected, rtol=2e-5, atol=2e-7)
    kl = generalized_jsd(student64 @ head.double().t(), teacher64, 1.0, temperature)
    torch.testing.assert_close(found.student_kl.double(), kl, rtol=2e-5, atol=2e-7)
    same = (hidden @ head.t()).argmax(-1) == (taught @ teacher_head.t()).argmax(-1)
    assert torch.equal(found.agreed, same)
    (ours,) = torch.autograd.grad(found.value, hidden, upstream)
    assert float((ours - slope).norm() / slope.norm()) <= 1e-5
    assert not found.student_kl.requires_grad
    with torch.no_grad():
        again = divergence(hidden, head, teacher_hidden, teacher_head, beta=beta, temperature=temperature)
    assert not again.value.requires_grad
    assert torch.equal(again.value, found.value.detach())


@pytest.mark.parametrize("beta", BETAS)
def test_distributions_that_have_nothing_in_common(beta: float) -> None:
    """Where one side's probability underflows, nothing is infinite that is not."""
    student = torch.tensor([[200.0, 0.0, -200.0, 1.0]], requires_grad=True)
    teacher = torch.tensor([[-200.0, 0.0, 200.0, 1.0]])
    found = divergence_rows(student, teacher, beta)
    expected = generalized_jsd(student.double(), teacher.double(), beta, 1.0)
    torch.testing.assert_close(found.value.double(), expected, rtol=1e-5, atol=1e-6)
    (slope,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(found.slope, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_near_the_teacher_it_is_small_and_exact(beta: float) -> None:
    """What training ends at: both sides nearly equal. The parts must not cancel into noise."""
    teacher = normal(5, 300, seed=0, scale=3.0)
    student = teacher + normal(5, 300, seed=1, scale=1e-2)
    expected = generalized_jsd(student.double(), teacher.double(), beta, 1.0)
    assert float(expected.max()) < 1e-4
    found = divergence_rows(student, teacher, beta)
    torch.testing.assert_close(found.value.double(), expected, rtol=2e-2, atol=2e-7)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"beta": -0.1}, "beta must be between 0 and 1"),
        ({"beta": 1.1}, "beta must be between 0 and 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("inf")}, "temperature must be above 0"),
    ],
)
def test_refused(change: dict[str, float], match: str) -> None:
    hidden, head = normal(2, 4, seed=0), normal(5, 4, seed=1)
    with pytest.raises(ValueError, match=match):
        divergence(hidden, head, hidden, head, **({"beta": 0.5, "temperature": 1.0} | change))


def test_other_widths_are_refused() -> None:
    hidden, head = normal(2, 4, seed=0), normal(5, 4, seed=1)
    with pytest.raises(ValueError, match="vocabularies of 5 and 4 tokens"):
        divergence(hidden, head, hidden, head[:4], beta=0.5, temperature=1.0)
