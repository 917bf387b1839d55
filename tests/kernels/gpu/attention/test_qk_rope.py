"""Norm, rotation and page writes against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.attention.pages import KvPages, quantize_heads
from kernels.gpu.attention.qk_rope import qk_norm_rope_write
from kernels.rope import Rotation, inverse_frequencies
from tests.kernels.gpu import interpreter  # noqa: F401

_EPS = 1e-6


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "rotary", "scale"),
    [(3, 4, 2, 32, 8, 1.0), (70, 3, 1, 24, 24, 1.0), (3, 2, 1, 32, 8, 1.14)],
)
def test_against_float64(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    scale: float,
    dtype: torch.dtype,
    fp8: bool,
    device: torch.device,
) -> None:
    torch.manual_seed(rows)
    block_size, total = 16, heads + kv_heads
    blocks = 70_000 // block_size + 1
    projected = (3 * torch.randn(rows, 2 * total * dim)).to(dtype)
    weight = 1 + 0.2 * torch.randn(total, dim)
    frequencies = inverse_frequencies(rotary, 1e7)
    # Row 0 is padding: slot 0, position 0.
    positions = torch.tensor([0, 15, *(69_000 + 7 * i for i in range(rows - 2))], dtype=torch.int32)
    slots = torch.tensor([0, *(1 + i % 2 for i in range(rows - 1))], dtype=torch.int32)
    tables = torch.zeros(3, blocks, dtype=torch.int32)
    used = -(-rows * 7 // block_size) + 3
    order = 1 + torch.randperm(2 * used)
    tables[1, 0], tables[2, 0] = int(order[0]), int(order[1])
    first = 69_000 // block_size
    tail = min(used - 1, blocks - first)
    tables[1, first : first + tail] = order[2 : 2 + tail].int()
    tables[2, first : first + tail] = order[2 + used - 1 : 2 + used - 1 + tail].int()
    kv = KvPages.allocate(2 * used + 1, block_size, kv_heads, dim, torch.float8_e4m3fn if fp8 else dtype, device)

    q = qk_norm_rope_write(
        projected.to(device),
        weight.to(device),
        _EPS,
        Rotation(frequencies.to(device), scale),
        positions.to(device),
        slots.to(device),
        tables.to(device),
        kv,
    )

    x = projected.double()[:, heads * dim :].view(rows, -1, dim)
    normed = x[:, :total] * (x[:, :total].square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight.double()
    angle = (positions.float().unsqueeze(-1) * frequencies).double().unsqueeze(1)
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    a, b, rest = normed.split([rotary // 2, rotary // 2, dim - rotary], -1)
    rotated = torch.cat((a * cosine - b * sine, b * cosine + a * sine, rest), -1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(q.double().cpu(), rotated[:, :heads], atol=tolerance, rtol=tolerance)

    place = tables[slots.long(), positions.long() // block_size].long() * block_size + positions.long() % block_size
    written = [pages.view(-1, kv_heads, dim)[place] for pages in (x.cpu() for x in kv.dense())]
    for got, expected in zip(written, (rotated[:, heads:], x[:, total:]), strict=True):
        if fp8:
            stored, scale = quantize_heads(expected)
            step = scale.unsqueeze(-1).double() * 32  # between neighbouring e4m3 numbers at the top of the range
            assert ((got.double() - expected).abs() <= 0.5 * step + 1e-4).all()
            rounded = stored.double() * scale.double().unsqueeze(-1)
            assert ((got.double() - rounded).abs() <= 1e-4 * scale.unsqueeze(-1)).double().mean() > 0.99
        else:
            torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_contradictions_are_refused(device: torch.device) -> None:
    kv = KvPages.allocate(2, 16, 2, 32, torch.float32, device)
    rows, one = torch.zeros(1, 999), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="999"):
        qk_norm_rope_write(rows, torch.zeros(6, 32), _EPS, Rotation(torch.zeros(4)), one, one, torch.zeros(1, 1), kv)
    with pytest.raises(ValueError, match="both scales"):
        KvPages(kv.keys.to(torch.float8_e4m3fn), kv.values.to(torch.float8_e4m3fn))
