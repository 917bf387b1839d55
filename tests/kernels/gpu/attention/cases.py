"""Pages, tables and exact results for the attention kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.attention.pages import KvPages, quantize_heads


@dataclass(frozen=True, slots=True)
class Paged:
    """Sequences of these contexts in shuffled blocks; what no sequence owns is NaN."""

    kv: KvPages
    tables: Tensor
    """[slots, max_blocks] int32, row 0 zeros; sequence i has slot i + 1."""
    keys: list[Tensor]
    """[context, kv_heads, head_dim] float64, as the pages hold them."""
    values: list[Tensor]


def paged(
    contexts: Sequence[int],
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
    block_size: int = 16,
) -> Paged:
    generator = torch.Generator().manual_seed(sum(contexts) + dim)
    blocks = [-(-context // block_size) for context in contexts]
    order = torch.split(1 + torch.randperm(sum(blocks), generator=generator), blocks)
    tables = torch.zeros(len(contexts) + 1, max(blocks) + 1, dtype=torch.int32)
    shape = (1 + sum(blocks), block_size, kv_heads, dim)
    kv = KvPages.allocate(*shape, torch.float8_e4m3fn if fp8 else dtype, "cpu")
    exact: tuple[list[Tensor], list[Tensor]] = ([], [])
    pools = ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
    for (pool, scales), kept in zip(pools, exact, strict=True):
        if scales is None:
            pool.fill_(float("nan"))
        else:
            pool.view(torch.uint8).fill_(0x7F)
            scales.fill_(float("nan"))
        for index, context in enumerate(contexts):
            tables[index + 1, : blocks[index]] = order[index].int()
            position = torch.arange(context)
            place = order[index][position // block_size] * block_size + position % block_size
            x = torch.randn(context, kv_heads, dim, generator=generator).to(dtype)
            if scales is None:
                pool.view(-1, kv_heads, dim)[place] = x
                kept.append(x.double())
            else:
                stored, scale = quantize_heads(x)
                pool.view(torch.uint8).view(-1, kv_heads, dim)[place] = stored.view(torch.uint8)
                scales.view(-1, kv_heads)[place] = scale
                kept.append(stored.double() * scale.double().unsqueeze(-1))
    pages = (kv.keys.to(device), kv.values.to(device))
    if kv.key_scales is None or kv.value_scales is None:
        moved = KvPages(*pages)
    else:
        moved = KvPages(*pages, kv.key_scales.to(device), kv.value_scales.to(device))
    return Paged(moved, tables.to(device), *exact)


def exact_attention(q: Tensor, gate: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """q [T, heads, d] and gate [T, heads · d] at positions start …, over keys and values [≥ start + T, kv_heads, d],
    all in float64 on the CPU. Returns [T, heads · d]."""
    count, heads, dim = q.shape
    context = start + count
    group = heads // keys.shape[1]
    k = keys[:context].repeat_interleave(group, 1).permute(1, 2, 0)
    v = values[:context].repeat_interleave(group, 1).transpose(0, 1)
    scores = q.double().cpu().transpose(0, 1) @ k * dim**-0.5
    hidden = torch.arange(context)[None, :] > start + torch.arange(count)[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return (weights @ v).transpose(0, 1).reshape(count, heads * dim) * torch.sigmoid(gate.double().cpu())
