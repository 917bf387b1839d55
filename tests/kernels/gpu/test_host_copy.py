"""Words go over the bus as they are, both ways, whatever their number."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.host_copy import copy_words
from tests.kernels.gpu import interpreter  # noqa: F401


def host(words: int, device: torch.device) -> torch.Tensor:
    made = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32)
    return made.pin_memory() if device.type == "cuda" else made


@pytest.mark.parametrize("words", [0, 1, 511, 512, 513, 40_000])
def test_there_and_back(device: torch.device, words: int) -> None:
    sent, received = host(words, device), host(words + 1, device)
    last = received[-1].item()
    there = torch.full((words + 3,), 7, dtype=torch.int32, device=device)
    copy_words(there[:words], sent)
    copy_words(received[:words], there[:words])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(received[:words], sent)
    assert received[-1].item() == last
    assert there[words:].tolist() == [7, 7, 7]


def test_shapes_are_checked(device: torch.device) -> None:
    words = torch.zeros(8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="copy_words"):
        copy_words(words[:7], words)
    with pytest.raises(ValueError, match="copy_words"):
        copy_words(words.float(), words)
    with pytest.raises(ValueError, match="contiguous"):
        copy_words(words[::2], words[:4])
