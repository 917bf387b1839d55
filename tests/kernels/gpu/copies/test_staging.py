"""Items to and from a staging buffer: bit for bit, with the checksums of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.gpu.copies.staging import move_items
from services.engine.kv_offload.entry_format import checksum, weights


def random_words(*shape: int) -> torch.Tensor:
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, shape, dtype=np.int64)
    return torch.from_numpy(numbers)


@pytest.mark.parametrize(("rows", "slots", "words"), [(3, 6, 5), (1, 4, 2049), (4, 5, 4096)])
def test_there_and_back(device: torch.device, rows: int, slots: int, words: int) -> None:
    """Rows of a pool between others of the same items, as keys between scales."""
    pool = random_words(rows, slots, words)
    items, targets = [3, 1], [0, 2]
    before, stride = 7, rows * words + 11
    ours, staging = pool.to(device), torch.full((2 * stride,), 5, dtype=torch.int64, device=device)
    sums = torch.tensor([100, -(2**63)], dtype=torch.int64, device=device)
    index = torch.tensor(items, dtype=torch.int32, device=device)
    move_items(ours, staging, index, sums, item_stride=stride, first_word=before, to_pool=False)
    assert torch.equal(ours.cpu(), pool)
    staged = staging.cpu().view(2, stride)
    for place, item in enumerate(items):
        assert torch.equal(staged[place, : rows * words].view(rows, words), pool[:, item])
    assert bool((staged[:, rows * words :] == 5).all())
    weight = weights(before + rows * words)[before:]
    expected = [checksum(pool[:, item].contiguous().numpy().view(np.uint8).reshape(-1), weight) for item in items]
    found = [(int(x) - start) % 2**64 for x, start in zip(sums, (100, -(2**63)), strict=True)]
    assert found == [x % 2**64 for x in expected]
    again = torch.zeros(2, dtype=torch.int64, device=device)
    index = torch.tensor(targets, dtype=torch.int32, device=device)
    move_items(ours, staging, index, again, item_stride=stride, first_word=before, to_pool=True)
    assert again.tolist() == expected
    assert torch.equal(ours[:, targets].cpu(), pool[:, items])
    rest = sorted(set(range(slots)) - set(targets))
    assert torch.equal(ours[:, rest].cpu(), pool[:, rest])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    pool, index = random_words(2, 3, 4).to(device), torch.zeros(2, dtype=torch.int32, device=device)
    sums, staging = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(15, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="do not fit"):
        move_items(pool, staging, index, sums, item_stride=8, first_word=0, to_pool=True)
    with pytest.raises(ValueError, match="int64"):
        move_items(pool.int(), staging, index, sums, item_stride=7, first_word=0, to_pool=True)
    with pytest.raises(ValueError, match="strides"):
        move_items(pool.mT, staging, index, sums, item_stride=7, first_word=0, to_pool=True)
