"""Norms, rotation and activation against float64."""

from __future__ import annotations

import torch

from kernels.activations import swiglu
from kernels.rms_norm import gated_rms_norm, l2_normalize, rms_norm
from kernels.rope import Rotation, apply_rope, inverse_frequencies, rope_tables


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), exact, atol=1e-5, rtol=1e-5)
    half = rms_norm(x.bfloat16(), weight, 1e-6)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), exact, atol=0.05, rtol=0.02)


def test_rms_norm_of_zero_is_zero() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


def test_gradient_of_norms() -> None:
    for norm in (lambda x: rms_norm(x, torch.ones(8), 1e-6), l2_normalize):
        x = torch.randn(3, 8, requires_grad=True)
        norm(x).pow(3).sum().backward()
        exact = x.detach().double().requires_grad_()
        scale = exact.square().mean(-1, keepdim=True) + 1e-6
        if norm is l2_normalize:
            scale = exact.square().sum(-1, keepdim=True) + 1e-6
        (exact / scale.sqrt()).pow(3).sum().backward()
        torch.testing.assert_close(x.grad.double(), exact.grad, atol=1e-5, rtol=1e-4)


def test_l2_normalize_scales_queries_only() -> None:
    pairs = torch.randn(4, 2, 3, 8)
    out = l2_normalize(pairs, torch.tensor([0.5, 1.0]).view(2, 1, 1))
    torch.testing.assert_close(out.norm(dim=-1), torch.tensor([0.5, 1.0]).view(1, 2, 1).expand(4, 2, 3))


def test_gated_norm() -> None:
    x, gate, weight = torch.randn(4, 3, 8), torch.randn(4, 3, 8), torch.randn(8)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    exact = exact * gate.double() / (1 + (-gate.double()).exp())
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6).double(), exact, atol=1e-5, rtol=1e-5)


def test_rope_rotates_pairs_and_passes_the_rest() -> None:
    x, positions = torch.randn(6, 2, 16), torch.tensor([0, 1, 2, 70, 500, 4000])
    rotation = Rotation(inverse_frequencies(8, 1e4))
    out = apply_rope(x, *rope_tables(positions, rotation))
    torch.testing.assert_close(out[..., 8:], x[..., 8:], atol=0, rtol=0)
    torch.testing.assert_close(out[0], x[0])
    for row, position in enumerate(positions.tolist()):
        for pair in range(4):
            turn = torch.polar(torch.ones(2), torch.full((2,), position * float(1e4 ** (-2 * pair / 8))))
            rotated = torch.complex(x[row, :, pair], x[row, :, pair + 4]) * turn
            torch.testing.assert_close(out[row, :, pair], rotated.real, atol=1e-3, rtol=0)
            torch.testing.assert_close(out[row, :, pair + 4], rotated.imag, atol=1e-3, rtol=0)


def test_rope_over_a_whole_head() -> None:
    x = torch.randn(3, 2, 8)
    out = apply_rope(x, *rope_tables(torch.arange(3), Rotation(inverse_frequencies(8, 1e4))))
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))


def test_swiglu() -> None:
    x = torch.randn(3, 10)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(swiglu(x).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=1e-5)
