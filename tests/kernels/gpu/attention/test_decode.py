"""Split paged decode against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.attention.decode import DecodeConfig, DecodeWorkspace, decode_splits, paged_decode
from kernels.gpu.launch.device import named
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.attention.cases import Paged, exact_attention, paged

_CONFIG = DecodeConfig(block_keys=16, warps=4, stages=2, splits=3, min_keys=32, max_keys=40)


def check(
    case: Paged,
    contexts: list[int],
    heads: int,
    dtype: torch.dtype,
    splits: int,
    tolerance: float,
) -> torch.Tensor:
    device, dim, batch = case.tables.device, case.kv.head_dim, len(contexts) + 1
    torch.manual_seed(5)
    # The last row is padding: slot 0, position 0, block 0. Its result must not disturb the others.
    q = torch.randn(batch, heads, dim).to(device, dtype)
    projected = torch.randn(batch, 2 * heads * dim).to(device, dtype)
    slots = torch.tensor([*range(1, batch), 0], dtype=torch.int32, device=device)
    positions = torch.tensor([*(c - 1 for c in contexts), 0], dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.allocate(batch + 1, heads, case.kv.kv_heads, splits, dim, device)
    out = paged_decode(
        q, projected, case.kv, case.tables, slots, positions, splits, workspace=workspace, config=_CONFIG
    )
    for row, context in enumerate(contexts):
        expected = exact_attention(
            q[row : row + 1], projected[row : row + 1, : heads * dim], case.keys[row], case.values[row], context - 1
        )
        torch.testing.assert_close(out[row : row + 1].double().cpu(), expected, atol=tolerance, rtol=tolerance)
    assert not workspace.arrived.any()
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("splits", [1, 3, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 1, 24)])
def test_float32(splits: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> None:
    contexts = [1, 15, 16, 17, 32, 33, 64, 65, 129]
    case = paged(contexts, kv_heads, dim, torch.float32, device)
    check(case, contexts, heads, torch.float32, splits, 1e-5)


@pytest.mark.parametrize("fp8", [False, True])
def test_bfloat16(fp8: bool, device: torch.device) -> None:
    contexts = [1, 31, 150]
    case = paged(contexts, 2, 64, torch.bfloat16, device, fp8=fp8)
    check(case, contexts, 8, torch.bfloat16, 3, 1e-2)


def test_a_row_has_the_same_bits_in_any_batch_and_every_time(device: torch.device) -> None:
    contexts = [70, 40, 129]
    case = paged(contexts, 2, 32, torch.float32, device)
    whole = check(case, contexts, 4, torch.float32, 4, 1e-5)
    again = check(case, contexts, 4, torch.float32, 4, 1e-5)
    assert torch.equal(whole[:3], again[:3])
    torch.manual_seed(5)
    q = torch.randn(4, 4, 32).to(device)
    projected = torch.randn(4, 2 * 4 * 32).to(device)
    slots = torch.tensor([3], dtype=torch.int32, device=device)
    positions = torch.tensor([128], dtype=torch.int32, device=device)
    alone = paged_decode(q[2:3], projected[2:3], case.kv, case.tables, slots, positions, 4, config=_CONFIG)
    assert torch.equal(alone[0], whole[2])


@pytest.mark.sampled
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("together", [2, 3, 5])
def test_rows_of_a_sequence_together(together: int, fp8: bool, device: torch.device) -> None:
    """Each sees its own context, also where splits of the last one's lie behind it; the last sequence's last rows are
    padding, and so are all of another."""
    contexts, heads, splits, dim = [together, 33, 41, 130], 4, 3, 32
    dtype = torch.bfloat16 if fp8 else torch.float32
    case = paged(contexts, 2, dim, dtype, device, fp8=fp8)
    torch.manual_seed(5)
    rows = together * (len(contexts) + 1)
    q = torch.randn(rows, heads, dim).to(device, dtype)
    projected = torch.randn(rows, 2 * heads * dim).to(device, dtype)
    starts = [context - together for context in contexts]
    positions = [start + index for start in starts for index in range(together)] + [0] * together
    slots = [slot for slot in (1, 2, 3, 4, 0) for _ in range(together)]
    positions[4 * together - 1] = slots[4 * together - 1] = 0
    ints = {"dtype": torch.int32, "device": device}
    out = paged_decode(
        q,
        projected,
        case.kv,
        case.tables,
        torch.tensor(slots, **ints),
        torch.tensor(positions, **ints),
        splits,
        config=_CONFIG,
        together=together,
    )
    tolerance = 1e-2 if fp8 else 1e-5
    for index, start in enumerate(starts):
        held = together - (index == 3)
        here = slice(index * together, index * together + held)
        expected = exact_attention(q[here], projected[here, : heads * dim], case.keys[index], case.values[index], start)
        torch.testing.assert_close(out[here].double().cpu(), expected, atol=tolerance, rtol=tolerance)
    assert out[: 4 * together].isfinite().all()


def test_splits_follow_the_batch() -> None:
    assert [decode_splits(batch, 4, named("sm90")) for batch in (1, 16, 64, 256)] == [32, 16, 4, 4]


def test_contradictions_are_refused(device: torch.device) -> None:
    case = paged([5], 2, 32, torch.float32, device)
    q, one = torch.zeros(1, 4, 32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    projected = torch.zeros(1, 256, device=device)
    with pytest.raises(ValueError, match="got 0"):
        paged_decode(q, projected, case.kv, case.tables, one, one, 0)
    with pytest.raises(ValueError, match="fit pages"):
        paged_decode(q[..., :16].contiguous(), projected, case.kv, case.tables, one, one, 1)
    workspace = DecodeWorkspace.allocate(1, 4, 2, 2, 32, device)
    with pytest.raises(ValueError, match="3 splits"):
        paged_decode(q, projected, case.kv, case.tables, one, one, 3, workspace=workspace)
