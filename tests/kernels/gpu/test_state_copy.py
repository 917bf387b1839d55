"""State copies between slots against an indexed assignment, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.state_copy import copy_states


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
