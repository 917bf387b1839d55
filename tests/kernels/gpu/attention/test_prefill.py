"""Paged prefill over a prefix against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.attention.prefill import OVERLAPPED, PrefillConfig, paged_prefill, prefill_config
from kernels.gpu.launch.device import limits_of
from kernels.gpu.segments import Segments
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.attention.cases import Paged, exact_attention, paged

_CONFIG = PrefillConfig(block_rows=64, block_keys=32, warps=4, stages=2, tail_stages=2)


def check(
    case: Paged,
    lengths: list[int],
    starts: list[int],
    heads: int,
    dtype: torch.dtype,
    tolerance: float,
    config: PrefillConfig | None = _CONFIG,
) -> None:
    """The segments stand behind two rows of decodes, and the launch has room for more of them."""
    device, dim, rows = case.tables.device, case.kv.head_dim, 2 + sum(lengths)
    torch.manual_seed(6)
    q = torch.randn(rows, heads, dim).to(device, dtype)
    projected = torch.randn(rows, 2 * heads * dim).to(device, dtype)
    slots = list(range(1, len(lengths) + 1))
    segments = Segments.build(
        lengths, starts, slots, [0] * len(slots), device, first_row=2, max_segments=len(slots) + 2, max_tiles=8
    )
    out = torch.full((rows, heads * dim), 7.0, dtype=dtype, device=device)
    paged_prefill(q, projected, case.kv, case.tables, segments, out=out, config=config)
    assert (out[:2] == 7).all()
    begin = 2
    for index, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        run = slice(begin, begin + length)
        expected = exact_attention(q[run], projected[run, : heads * dim], case.keys[index], case.values[index], start)
        torch.testing.assert_close(out[run].double().cpu(), expected, atol=tolerance, rtol=tolerance)
        begin += length


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 1, 24)])
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([1, 31, 32, 33], [0, 0, 0, 0]), ([63, 64, 65], [0, 5, 64]), ([1, 1, 70], [31, 32, 127]), ([129], [128])],
)
def test_float32(
    lengths: list[int], starts: list[int], heads: int, kv_heads: int, dim: int, device: torch.device
) -> None:
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    check(paged(contexts, kv_heads, dim, torch.float32, device), lengths, starts, heads, torch.float32, 1e-5)


@pytest.mark.parametrize("fp8", [False, True])
def test_bfloat16(fp8: bool, device: torch.device) -> None:
    lengths, starts = [40, 70], [0, 65]
    case = paged([40, 135], 2, 64, torch.bfloat16, device, fp8=fp8)
    check(case, lengths, starts, 8, torch.bfloat16, 1e-2, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_split_of_a_prompt_has_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    total, heads, dim = 129, 2, 32
    case = paged([total], 1, dim, dtype, device)
    q = torch.randn(total, heads, dim).to(device, dtype)
    projected = torch.randn(total, 2 * heads * dim).to(device, dtype)

    def run(start: int, end: int) -> torch.Tensor:
        segments = Segments.build([end - start], [start], [1], [0], device)
        return paged_prefill(q[start:end], projected[start:end], case.kv, case.tables, segments, config=_CONFIG)

    whole = run(0, total)
    for cut in (1, 33, 64, 127):
        assert torch.equal(torch.cat((run(0, cut), run(cut, total))), whole)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([1, 31, 33], [0, 0, 0]), ([63, 64, 65], [0, 5, 64]), ([1, 70, 2], [62, 127, 63]), ([129], [1000])],
)
def test_heads_of_256_dimensions(lengths: list[int], starts: list[int], device: torch.device) -> None:
    """What Hopper has a kernel of its own for."""
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    case = paged(contexts, 1, 256, torch.bfloat16, device)
    check(case, lengths, starts, 4, torch.bfloat16, 1e-2, None)


@pytest.mark.cuda
def test_hopper_computes_the_same_bits(device: torch.device) -> None:
    if limits_of(device).capability != (9, 0):
        pytest.skip("not Hopper, or not to be cut up as it")
    lengths, starts = [129, 300, 1, 64, 700, 1, 31], [1000, 0, 77, 63, 5000, 0, 64]
    case = paged(
        [start + length for start, length in zip(starts, lengths, strict=True)], 4, 256, torch.bfloat16, device
    )
    assert prefill_config(case.kv, 16, limits_of(device)) == OVERLAPPED
    rows = sum(lengths)
    q = torch.randn(rows, 16, 256).to(device, torch.bfloat16)
    projected = torch.randn(rows, 2 * 16 * 256).to(device, torch.bfloat16)
    segments = Segments.build(lengths, starts, range(1, 8), [0] * 7, device, max_segments=9, max_tiles=32)
    expected = torch.zeros(rows, 16 * 256, dtype=torch.bfloat16, device=device)
    plain = PrefillConfig(block_rows=128, block_keys=64, warps=8, stages=2, tail_stages=1)
    paged_prefill(q, projected, case.kv, case.tables, segments, out=expected, config=plain)
    for pdl in (False, True) * 5:
        out = torch.zeros_like(expected)
        paged_prefill(q, projected, case.kv, case.tables, segments, out=out, pdl=pdl)
        assert torch.equal(out, expected)


def test_contradictions_are_refused(device: torch.device) -> None:
    case = paged([5], 2, 32, torch.float32, device)
    segments = Segments.build([5], [0], [1], [0], device)
    with pytest.raises(ValueError, match="fit pages"):
        paged_prefill(torch.zeros(5, 3, 32), torch.zeros(5, 96), case.kv, case.tables, segments)
    with pytest.raises(ValueError, match="no gate"):
        paged_prefill(torch.zeros(5, 4, 32), torch.zeros(5, 96), case.kv, case.tables, segments)
    with pytest.raises(ValueError, match="no overlapped kernel"):
        paged_prefill(torch.zeros(5, 4, 32), torch.zeros(5, 128), case.kv, case.tables, segments, config=OVERLAPPED)
