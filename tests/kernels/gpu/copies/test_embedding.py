"""Token gather: known tokens, tokens still on the device, padding."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.copies.embedding import gather_tokens


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [256, 40])
def test_pending_rows_take_the_last_token_of_their_slot(device: torch.device, dtype: torch.dtype, width: int) -> None:
    embedding = torch.randn(50, width, device=device).to(dtype)
    last = ints([0, 41, 42, 49], device)
    out = gather_tokens(ints([7, -1, -1, 49, 0], device), last, ints([1, 3, 2, 1, 0], device), embedding)
    assert torch.equal(out, embedding[[7, 49, 42, 49, 0]])


def test_a_token_outside_the_vocabulary_reads_nothing_outside(device: torch.device) -> None:
    embedding = torch.randn(5, 16, device=device)
    out = gather_tokens(ints([-1, 9], device), ints([-7], device), ints([0, 0], device), embedding)
    assert torch.equal(out, embedding[[0, 4]])


def test_shapes_are_checked(device: torch.device) -> None:
    with pytest.raises(ValueError, match="slots"):
        gather_tokens(ints([1, 2], device), ints([0], device), ints([0], device), torch.zeros(3, 4, device=device))
