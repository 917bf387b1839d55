"""New block table entries against an indexed assignment."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.copies.block_tables import write_tables


@pytest.mark.parametrize("count", [0, 1, 255, 300])
def test_entries_go_to_their_places_and_nowhere_else(device: torch.device, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tables = torch.randint(0, 99, (9, 40), dtype=torch.int32, generator=generator)
    places = torch.randperm(360, generator=generator)[:count]
    blocks = torch.randint(100, 999, (count,), generator=generator)
    expected = tables.clone()
    expected.view(-1)[places] = blocks.int()
    ours = tables.to(device)
    write_tables(ours, torch.stack((places, blocks), 1).int().to(device))
    assert torch.equal(ours.cpu(), expected)


def test_misshapen_entries_are_refused(device: torch.device) -> None:
    tables = torch.zeros(2, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="entries"):
        write_tables(tables, torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="int64"):
        write_tables(tables, torch.zeros(3, 2, dtype=torch.int64, device=device))
