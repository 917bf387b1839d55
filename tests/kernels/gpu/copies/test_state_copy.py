"""Copies between slots and between blocks against an indexed assignment, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.attention.pages import StackedPages
from kernels.gpu.copies.state_copy import copy_states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 6, 3, 5, 7), (1, 5, 4097), (3, 6, 3, 64)])
def test_copies_of_all_layers(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    pairs = torch.tensor([[1, 4], [3, 2]], dtype=torch.int32)
    expected = pool.clone()
    expected[:, [4, 2]] = pool[:, [1, 3]]
    ours = pool.to(device)
    copy_states(ours, pairs.to(device))
    assert torch.equal(ours.cpu(), expected)


def test_nothing_to_copy(device: torch.device) -> None:
    pool = torch.ones(2, 3, 4, device=device)
    copy_states(pool, torch.zeros(0, 2, dtype=torch.int32, device=device))
    copy_states(torch.zeros(0, 3, 4, device=device), torch.tensor([[1, 2]], dtype=torch.int32, device=device))
    assert bool((pool == 1).all())


def test_a_pool_with_gaps_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        copy_states(torch.zeros(2, 3, 4, device=device).transpose(1, 2), torch.zeros(1, 2, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copies_of_blocks_in_all_layers(device: torch.device, dtype: torch.dtype) -> None:
    """Keys, values and their scales, by what a layer's kernels see of them."""
    stacked = StackedPages.allocate(3, 7, 4, 2, 16, dtype, device)
    generator = torch.Generator().manual_seed(0)
    for pool in stacked.pools():
        pool.copy_(torch.randint(0, 120, pool.shape, generator=generator, dtype=torch.uint8))
    layers = stacked.layers()
    parts = [part for page in layers for part in (page.keys, page.values, page.key_scales, page.value_scales)]
    parts = [part.view(torch.uint8) for part in parts if part is not None]
    assert len(parts) == 3 * (4 if dtype == torch.float8_e4m3fn else 2)
    before = [part.clone() for part in parts]
    pairs = torch.tensor([[1, 4], [3, 2], [1, 6]], dtype=torch.int32, device=device)
    for pool in stacked.pools():
        copy_states(pool.view(torch.int32), pairs)
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part[[4, 2, 6]], old[[1, 3, 1]])
        assert torch.equal(part[[0, 1, 3, 5]], old[[0, 1, 3, 5]])
        assert not torch.equal(part[4], old[4])


@pytest.mark.cuda
def test_copies_beyond_2_gib(device: torch.device) -> None:
    wide = torch.zeros(2, 11, 2**28, dtype=torch.uint8, device=device)
    assert wide[0].numel() > 2**31
    wide[:, 10] = 7
    copy_states(wide, torch.tensor([[10, 9]], dtype=torch.int32, device=device))
    assert bool((wide[:, 9] == 7).all())
    assert not bool(wide[:, :9].any())
