"""Softmax attention with grouped heads: paged decode, paged prefill over a prefix, packed causal for training.

``softmax(q kᵀ / sqrt(head_dim)) v``; each key/value head serves heads / kv_heads consecutive query heads. References
on torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def write_pages(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Puts values [T, kv_heads, head_dim] at flat slots [T] int64 of cache [blocks, block_size, kv_heads, head_dim]."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)


def read_pages(cache: Tensor, tables: Tensor, length: int) -> Tensor:
    """The first ``length`` positions of n sequences, [n, length, kv_heads, head_dim], by block tables [n, blocks]."""
    pages = cache.index_select(0, tables.reshape(-1))
    return pages.view(tables.shape[0], -1, *cache.shape[2:])[:, :length]


def paged_decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, length: int, mask: Tensor | None) -> Tensor:
    """Attention of one query position of each of n sequences over its pages.

    Args:
        q: [n, heads, head_dim].
        keys, values: [blocks, block_size, kv_heads, head_dim].
        tables: [n, ceil(length / block_size)] int64.
        length: longest context of the batch, the query's own position included.
        mask: [n, 1, 1, length] bool, True where the sequence has a token; None: all are ``length`` long.

    Returns:
        [n, heads, head_dim].
    """
    n, heads, head_dim = q.shape
    k = read_pages(keys, tables, length).transpose(1, 2)
    v = read_pages(values, tables, length).transpose(1, 2)
    # The query heads of a group share keys and mask, so they stand as query positions of one head.
    grouped = q.reshape(n, k.shape[1], -1, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(n, heads, head_dim)


def paged_prefill(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, start: int) -> Tensor:
    """A run of consecutive positions of one sequence against its prefix and itself.

    Args:
        q: [T, heads, head_dim], positions start … start + T - 1.
        keys, values: [blocks, block_size, kv_heads, head_dim], already holding these positions.
        table: [ceil((start + T) / block_size)] int64.

    Returns:
        [T, heads, head_dim].
    """
    count, heads, head_dim = q.shape
    k = read_pages(keys, table.unsqueeze(0), start + count).transpose(1, 2)
    v = read_pages(values, table.unsqueeze(0), start + count).transpose(1, 2)
    if count == 1:
        grouped = q.reshape(1, k.shape[1], -1, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v).reshape(1, heads, head_dim)
    k, v = _repeat(k, heads), _repeat(v, heads)
    queries = q.transpose(0, 1).unsqueeze(0)
    if start == 0:
        out = F.scaled_dot_product_attention(queries, k, v, is_causal=True)
    else:
        mask = torch.ones(count, start + count, dtype=torch.bool, device=q.device).tril(start)
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
    return out.squeeze(0).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Packed segments, gathered into padded batches of similar length (within a factor of two)."""

    batches: tuple[tuple[Tensor, int], ...]
    """Per batch: rows [n · width] int64 (padding points at some row) and width."""
    scatter: Tensor
    """[T] int64: place of each token in the batches, laid end to end."""

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Layout of segments of these lengths, each at least 1, in order and without gaps."""
        buckets: dict[int, list[tuple[int, int]]] = {}
        begin = 0
        for length in lengths:
            buckets.setdefault(length.bit_length(), []).append((begin, length))
            begin += length
        batches: list[tuple[Tensor, int]] = []
        scatter = torch.empty(begin, dtype=torch.int64)
        offset = 0
        for members in buckets.values():
            width = max(length for _, length in members)
            starts = torch.tensor([start for start, _ in members])
            sizes = torch.tensor([length for _, length in members])
            within = torch.arange(width)
            rows = starts[:, None] + torch.minimum(within[None, :], sizes[:, None] - 1)
            real = within[None, :] < sizes[:, None]
            places = offset + torch.arange(rows.numel()).view(rows.shape)
            scatter[rows[real]] = places[real]
            batches.append((rows.flatten().to(device), width))
            offset += rows.numel()
        return cls(tuple(batches), scatter.to(device))


def packed_causal(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    """Causal attention within each packed segment. Differentiable.

    Args:
        q: [T, heads, head_dim].
        k, v: [T, kv_heads, head_dim].

    Returns:
        [T, heads, head_dim].
    """
    heads = q.shape[1]
    outputs: list[Tensor] = []
    for rows, width in layout.batches:
        # Padding stands behind the segment's own tokens, where causality hides it.
        batch = [x.index_select(0, rows).view(-1, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(
            batch[0], _repeat(batch[1], heads), _repeat(batch[2], heads), is_causal=True
        )
        outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return torch.cat(outputs).index_select(0, layout.scatter)


@dataclass(frozen=True, slots=True)
class BranchLayout:
    """Packed segments that go on from others: each sees those before it up to its root, and itself causally. In padded
    batches of similar length (within a factor of two, of queries and of keys)."""

    batches: tuple[tuple[Tensor, Tensor, Tensor], ...]
    """Per batch: rows of queries [n, width] and of keys [n, context] int64 (padding points at some row), and mask
    [n, 1, width, context] bool, True where a query sees a key."""
    scatter: Tensor
    """[T] int64: place of each token of the segments in the batches, laid end to end."""

    @classmethod
    def build(cls, queries: Sequence[range], contexts: Sequence[Sequence[range]], device: torch.device) -> BranchLayout:
        """Layout of segments with these rows, in order and without gaps.

        Args:
            contexts: rows of what comes before each segment, from its root on.
        """
        if not queries:
            return cls((), torch.empty(0, dtype=torch.int64, device=device))
        buckets: dict[tuple[int, int], list[int]] = {}
        before = [sum(map(len, context)) for context in contexts]
        for index, rows in enumerate(queries):
            buckets.setdefault((len(rows).bit_length(), (before[index] + len(rows)).bit_length()), []).append(index)
        scatter = torch.empty(sum(map(len, queries)), dtype=torch.int64)
        first = queries[0].start
        batches, offset = [], 0
        for members in buckets.values():
            width = max(len(queries[index]) for index in members)
            most = max(before[index] + len(queries[index]) for index in members)
            asking = torch.zeros(len(members), width, dtype=torch.int64)
            seen = torch.zeros(len(members), most, dtype=torch.int64)
            mask = torch.zeros(len(members), 1, width, most, dtype=torch.bool)
            for place, index in enumerate(members):
                rows = queries[index]
                size, past = len(rows), before[index]
                asking[place] = torch.arange(rows.start, rows.start + width).clamp(max=rows.stop - 1)
                context = [row for part in contexts[index] for row in part]
                seen[place, : past + size] = torch.tensor([*context, *rows])
                # Padded queries see what the last one does, so that no row of a softmax is empty.
                last = torch.arange(width).clamp(max=size - 1) + past
                mask[place, 0] = torch.arange(most)[None, :] <= last[:, None]
                begin = offset + place * width
                scatter[rows.start - first : rows.stop - first] = torch.arange(begin, begin + size)
            batches.append((asking.to(device), seen.to(device), mask.to(device)))
            offset += asking.numel()
        return cls(tuple(batches), scatter.to(device))


def packed_branches(q: Tensor, k: Tensor, v: Tensor, layout: BranchLayout) -> Tensor:
    """Attention of the segments of a layout. Differentiable, also in what they share.

    Args:
        q: [T, heads, head_dim], of all rows that the layout points to, as k and v.
        k, v: [T, kv_heads, head_dim].

    Returns:
        [tokens of the segments, heads, head_dim].
    """
    heads = q.shape[1]
    outputs: list[Tensor] = []
    for asking, seen, mask in layout.batches:
        queries = q[asking].transpose(1, 2)
        keys, values = (_repeat(x[seen].transpose(1, 2), heads) for x in (k, v))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return torch.cat(outputs).index_select(0, layout.scatter)


def packed_chain(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], layout: PackedLayout) -> Tensor:
    """Attention of rows that go on from what stands at their place: each sees the first keys up to its place, and of
    further ones only those at its place. Differentiable.

    Args:
        q: [T, heads, head_dim].
        keys, values: [T, kv_heads, head_dim] each; the first are of what came before, the others of the chain.

    Returns:
        [T, heads, head_dim].
    """
    heads = q.shape[1]
    outputs: list[Tensor] = []
    for rows, width in layout.batches:

        def padded(x: Tensor, rows: Tensor = rows, width: int = width) -> Tensor:
            return x.index_select(0, rows).view(-1, width, *x.shape[1:]).transpose(1, 2)

        before = torch.ones(width, width, dtype=torch.bool, device=q.device).tril()
        here = torch.eye(width, dtype=torch.bool, device=q.device)
        k, v = (_repeat(torch.cat([padded(x) for x in parts], dim=2), heads) for parts in (keys, values))
        mask = torch.cat([before, *([here] * (len(keys) - 1))], dim=1)
        out = F.scaled_dot_product_attention(padded(q), k, v, attn_mask=mask)
        outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return torch.cat(outputs).index_select(0, layout.scatter)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """[n, kv_heads, T, d] to [n, heads, T, d]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
