"""Launches of what copies caches at the 4B shape, for tests.kernels.hopper."""

from __future__ import annotations

import torch

from kernels.gpu.copies.staging import move_items
from kernels.gpu.copies.state_copy import copy_states


def launches() -> None:
    pairs = torch.tensor([[1, 2]], dtype=torch.int32)
    for words in (4096, 262144):  # a block of keys in a layer, a recurrent state in a layer
        pool = torch.zeros(2, 3, words, dtype=torch.int64)
        copy_states(pool.view(torch.int32), pairs)
        staging, sums = torch.zeros(4 * words, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        for to_pool in (False, True):
            move_items(pool, staging, pairs[0], sums, item_stride=2 * words, first_word=0, to_pool=to_pool)
