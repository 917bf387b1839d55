"""The race of a block is decided by estimates only where they decide it as the exact race does."""

# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.sampling.rows import race, race_estimate, race_winner, uniform
from tests.kernels.gpu import interpreter  # noqa: F401

BLOCK = 512


@triton.jit
def _race_kernel(weight, u, exact, estimate, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(exact + i, race(tl.load(weight + i), tl.load(u + i)))
    tl.store(estimate + i, race_estimate(tl.load(weight + i), tl.load(u + i)))


@triton.jit
def _winner_kernel(weight, allowed, keys, winner, draws, exact, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weight + column)
    key_low = tl.load(keys).to(tl.uint32, bitcast=True)
    key_high = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    passes = tl.load(allowed + column) != 0
    tl.store(winner + block, race_winner(w, block, column, passes, (key_low, key_high), BLOCK))
    u = uniform(column, (key_low, key_high))
    tl.store(draws + column, u)
    tl.store(exact + column, race(w, u))


def races(weight: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The winner of each block, every token's draw and its exact race."""
    blocks = weight.numel() // BLOCK
    winner = torch.empty(blocks, dtype=torch.int32, device=weight.device)
    draws, exact = torch.empty_like(weight), torch.empty_like(weight)
    keys = torch.tensor([123_456_789, -987_654_321], dtype=torch.int32, device=weight.device)
    _winner_kernel[(blocks,)](weight, allowed.int(), keys, winner, draws, exact, BLOCK=BLOCK, enable_fp_fusion=False)
    return winner, draws, exact


def first_of_largest(exact: Tensor, allowed: Tensor) -> Tensor:
    values = torch.where(allowed, exact, -1.0).view(-1, BLOCK)
    chosen = (values == values.max(dim=1, keepdim=True).values).int()
    return chosen.argmax(dim=1) + BLOCK * torch.arange(len(values), device=exact.device)


def test_estimates_are_within_a_2048th_part(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    powers = 2.0 ** -torch.arange(1, 33, dtype=torch.float64)
    near = torch.cat([powers * (1 + sign * 2.0**-k) for k in (1, 5, 10, 20, 24) for sign in (-1, 1)])
    u = torch.cat([powers, near, 1 - powers, 2.0**-10 + (torch.rand(3000, generator=generator) - 0.5) * 2.0**-18])
    u = torch.cat([u, torch.rand(16 * BLOCK - u.numel(), generator=generator, dtype=torch.float64)])
    u = u.clamp(2.0**-32, 1 - 2.0**-24).float()
    weight = torch.exp(-20 * torch.rand(u.shape, generator=generator))
    exact, estimate = torch.empty_like(u, device=device), torch.empty_like(u, device=device)
    _race_kernel[(16,)](weight.to(device), u.to(device), exact, estimate, BLOCK=BLOCK, enable_fp_fusion=False)
    true = weight.double() / -torch.log1p(-u.double())
    assert float((exact.cpu() / true - 1).abs().max()) < 1e-6
    assert float((estimate.cpu() / true - 1).abs().max()) < 2.0**-11


def test_the_winner_is_that_of_the_exact_race(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.0, 0.1, 1.0, 5.0, 50.0, 100.0]).repeat(8)[:, None]
    weight = torch.exp(scale * torch.randn(48, BLOCK, generator=generator).clamp(max=0.0)).view(-1).to(device)
    allowed = (torch.rand(weight.shape, generator=generator) < 0.7).to(device)
    winner, _, exact = races(weight, allowed)
    assert torch.equal(winner, first_of_largest(exact, allowed).int())


def test_a_photo_finish(device: torch.device) -> None:
    """Weights that make up for the draws: the two first of each block are apart by what estimates cannot tell, or by
    nothing."""
    allowed = torch.ones(64 * BLOCK, dtype=torch.bool, device=device)
    _, draws, _ = races(torch.ones(64 * BLOCK, device=device), allowed)
    exponential = -torch.log1p(-draws.double()).view(64, BLOCK)
    generator = torch.Generator().manual_seed(2)
    weight = 1e-3 * torch.rand(64, BLOCK, generator=generator, dtype=torch.float64).to(device) * exponential
    pairs = torch.stack([torch.randperm(BLOCK, generator=generator)[:2] for _ in range(64)]).to(device)
    apart = 1 + torch.logspace(-9, -2, 64, dtype=torch.float64, device=device)
    level = exponential.gather(1, pairs) / exponential.gather(1, pairs).max(dim=1, keepdim=True).values
    weight.scatter_(1, pairs, level * torch.stack([torch.ones_like(apart), 1 / apart], dim=1))
    flat = weight.float().view(-1)
    winner, _, exact = races(flat, allowed)
    assert torch.equal(winner, first_of_largest(exact, allowed).int())
    assert len(set((winner.view(-1, 1) % BLOCK == pairs).int().argmax(dim=1).tolist())) == 2


def test_blocks_without_weight(device: torch.device) -> None:
    weight = torch.zeros(3 * BLOCK, device=device)
    weight[BLOCK] = 1e-38
    weight[2 * BLOCK :] = float("nan")
    allowed = torch.ones(3 * BLOCK, dtype=torch.bool, device=device)
    winner, _, _ = races(weight, allowed)
    assert winner.tolist() == [0, BLOCK, 2**31 - 1]
