"""Embedding rows of a step's tokens, where a token may still be on the device only.

Reference: ``embedding[tokens]`` with each −1 replaced by the last token of the row's slot.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS_A_WARP = 512


@triton.jit
def _gather_tokens_kernel(
    tokens,
    last_tokens,
    row_slots,
    embedding,
    out,
    vocab,
    columns,
    embedding_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.load(last_tokens + tl.load(row_slots + row))
    # A row whose sampling failed must not read outside the matrix before its request ends.
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    value = tl.load(embedding + token.to(tl.int64) * embedding_stride + column, mask=inside)
    tl.store(out + row * out_stride + column, value, mask=inside)


def gather_tokens(
    tokens: Tensor,
    last_tokens: Tensor,
    row_slots: Tensor,
    embedding: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The embeddings of a step's tokens. Runs after everything ahead of it, as the rule of
    `kernels.gpu.launch.programmatic` wants of a step's first kernel.

    Args:
        tokens: [T] int32; −1 means the token that the step before this one sampled for the row's slot.
        last_tokens: [num_slots] int32, what the sampler wrote last for each state slot.
        row_slots: [T] int32, the state slot of each row.
        embedding: [V, d] model dtype, last dimension contiguous.
        out: [T, d], where to write the result.

    Returns:
        [T, d] in the embedding's dtype, contiguous (it becomes the residual stream).

    Raises:
        ValueError: shapes do not fit.
    """
    (rows,) = tokens.shape
    vocab, columns = embedding.shape
    if row_slots.shape[0] < rows or embedding.stride(1) != 1:
        raise ValueError(f"gather_tokens: {rows} tokens, {row_slots.shape[0]} slots, embedding rows must be contiguous")
    if out is None:
        out = torch.empty(rows, columns, dtype=embedding.dtype, device=embedding.device)
    if rows:
        block = triton.next_power_of_2(columns)
        _gather_tokens_kernel[(rows,)](
            tokens,
            last_tokens,
            row_slots,
            embedding,
            out,
            vocab,
            columns,
            embedding.stride(0),
            out.stride(0),
            BLOCK=block,
            num_warps=max(1, min(8, block // _ELEMENTS_A_WARP)),
        )
    return out
