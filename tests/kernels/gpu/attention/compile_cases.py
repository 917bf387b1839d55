"""Launches of the attention kernels at the 4B shape, to be compiled for Hopper."""

from __future__ import annotations

import torch

from kernels.gpu.attention.decode import paged_decode
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.attention.prefill import OVERLAPPED, paged_prefill
from kernels.gpu.attention.qk_rope import qk_norm_rope_write
from kernels.gpu.segments import Segments
from kernels.rope import Rotation

_HEADS, _KV_HEADS, _DIM = 16, 4, 256


def launches() -> None:
    """Every kernel with bf16 and e4m3 pages."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        kv = KvPages.allocate(3, 16, _KV_HEADS, _DIM, dtype, "cpu")
        tables = torch.zeros(2, 4, dtype=torch.int32)
        for rows in (1, 128):
            projected = torch.zeros(rows, 2 * (_HEADS + _KV_HEADS) * _DIM, dtype=torch.bfloat16)
            ints = torch.zeros(rows, dtype=torch.int32)
            norm, rotation = torch.ones(_HEADS + _KV_HEADS, _DIM), Rotation(torch.ones(32))
            q = qk_norm_rope_write(projected, norm, 1e-6, rotation, ints, ints, tables, kv, pdl=rows == 1)
            paged_decode(q, projected, kv, tables, ints, ints, 64 if rows == 1 else 8, pdl=rows == 1)
        segments = Segments.build([64], [0], [1], [0], "cpu")
        paged_prefill(q, projected, kv, tables, segments)
        if not kv.quantized:
            paged_prefill(q, projected, kv, tables, segments, config=OVERLAPPED, pdl=True)
    # Pairs of e4m3 in heads of 16 dimensions: half as many as a tensor core product takes.
    kv = KvPages.allocate(3, 16, 2, 16, torch.float8_e4m3fn, "cpu")
    projected, one = torch.zeros(1, 2 * (4 + 2) * 16, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    q = qk_norm_rope_write(projected, torch.ones(4 + 2, 16), 1e-6, Rotation(torch.ones(2)), one, one, tables, kv)
    paged_decode(q, projected, kv, tables, one, one, 4)
