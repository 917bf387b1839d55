"""Paged and packed attention against a loop in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention import PackedLayout, packed_causal, paged_decode, paged_prefill, read_pages, write_pages

BLOCK = 4


def sequential(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """q [T, heads, d] at positions start …; k, v [start + T, kv_heads, d]."""
    rows = []
    for t in range(len(q)):
        heads = []
        for head in range(q.shape[1]):
            kv = head * k.shape[1] // q.shape[1]
            keys, values = k[: start + t + 1, kv].double(), v[: start + t + 1, kv].double()
            weights = torch.softmax(keys @ q[t, head].double() * q.shape[2] ** -0.5, 0)
            heads.append(weights @ values)
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def pages(contexts: list[int], kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Caches of garbage but for the sequences' own tokens, shuffled block tables, the plain keys and values."""
    torch.manual_seed(3)
    blocks = [-(-context // BLOCK) for context in contexts]
    order = (1 + torch.randperm(sum(blocks))).split(blocks)
    tables = torch.zeros(len(contexts), max(blocks), dtype=torch.int64)
    caches = [torch.full((1 + sum(blocks), BLOCK, kv_heads, dim), 50.0) for _ in range(2)]
    plain: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, context in enumerate(contexts):
        tables[row, : blocks[row]] = order[row]
        positions = torch.arange(context)
        slots = tables[row, positions // BLOCK] * BLOCK + positions % BLOCK
        for cache, kept in zip(caches, plain, strict=True):
            kept.append(torch.randn(context, kv_heads, dim))
            write_pages(cache, slots, kept[-1])
    return caches[0], caches[1], tables, plain[0], plain[1]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("contexts", [[1], [9], [8, 8], [1, 4, 13, 5]])
def test_decode(contexts: list[int], heads: int, kv_heads: int) -> None:
    keys, values, tables, k, v = pages(contexts, kv_heads, 8)
    q = torch.randn(len(contexts), heads, 8)
    length = max(contexts)
    mask = None
    if min(contexts) < length:
        mask = (torch.arange(length) < torch.tensor(contexts)[:, None])[:, None, None, :]
    out = paged_decode(q, keys, values, tables, length, mask)
    for row, context in enumerate(contexts):
        expected = sequential(q[row : row + 1], k[row], v[row], context - 1)
        torch.testing.assert_close(out[row].double(), expected[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 9), (5, 1), (5, 8), (8, 4)])
def test_prefill_over_a_prefix(start: int, count: int, heads: int, kv_heads: int) -> None:
    keys, values, tables, k, v = pages([start + count], kv_heads, 8)
    q = torch.randn(count, heads, 8)
    out = paged_prefill(q, keys, values, tables[0], start)
    torch.testing.assert_close(out.double(), sequential(q, k[0], v[0], start), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_packed_documents(heads: int, kv_heads: int) -> None:
    lengths = [5, 1, 9, 6, 2, 17]
    total = sum(lengths)
    q, k, v = (torch.randn(total, n, 8, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = packed_causal(q, k, v, PackedLayout.build(lengths, torch.device("cpu")))
    parts = zip(*(x.split(lengths) for x in exact), strict=True)
    expected = torch.cat([sequential(*part, 0) for part in parts])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    out.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip((q, k, v), exact, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-4, rtol=1e-4)


def test_pages_read_back_in_order() -> None:
    keys, _, tables, k, _ = pages([13], 2, 8)
    torch.testing.assert_close(read_pages(keys, tables, 13)[0], k[0], atol=0, rtol=0)
