"""Packed causal attention with its gate and its backward, against autograd in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.gpu.launch.device import limits_of, named
from kernels.gpu.train.attention import EXACT, AttentionCut, AttentionShape, attention_forward, forward_cut
from kernels.gpu.train.attention_backward import BackwardCuts, attention_backward, backward_cuts, gate_backward
from kernels.gpu.train.documents import Documents
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.train.support import TREE, along, attention64, branching, relative

LENGTHS = [70, 1, 3, 64, 130]


def inputs(shape: AttentionShape, count: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    width = shape.value_offset + shape.kv_heads * shape.head_dim
    rotated = torch.randn(count, shape.heads + shape.kv_heads, shape.head_dim, generator=generator)
    projected, dy = (
        torch.randn(count, width, generator=generator),
        torch.randn(count, shape.query_size, generator=generator),
    )
    return tuple(x.to(device, dtype) for x in (rotated, projected, dy))


def errors(
    shape: AttentionShape,
    lengths: list[int],
    device: torch.device,
    dtype: torch.dtype,
    forward: AttentionCut | None = None,
    backward: BackwardCuts | None = None,
) -> dict[str, float]:
    documents = Documents.build(lengths, device)
    return tree_errors(shape, [(length, None) for length in lengths], documents, dtype, forward, backward)


def tree_errors(
    shape: AttentionShape,
    tree: Sequence[tuple[int, int | None]],
    documents: Documents,
    dtype: torch.dtype,
    forward: AttentionCut | None = None,
    backward: BackwardCuts | None = None,
) -> dict[str, float]:
    rotated, projected, dy = inputs(shape, len(documents.positions), documents.positions.device, dtype)
    out, gated, normalizer = attention_forward(rotated, projected, shape, documents, cut=forward)
    grad = torch.zeros_like(projected)
    do, again, products = gate_backward(out, projected, dy, shape, projected_grad=grad)
    drotated = attention_backward(
        rotated,
        projected,
        do,
        normalizer,
        products,
        shape,
        documents,
        projected_grad=grad,
        cuts=backward,
    )
    rotated64 = rotated.double().requires_grad_()
    gate64 = projected[:, : shape.query_size].double().requires_grad_()
    values64 = shape.values(projected).double().requires_grad_()
    heads, wide = shape.heads, values64.unflatten(1, (shape.kv_heads, shape.head_dim))
    attended = along(
        lambda rows: attention64(rotated64[rows, :heads], rotated64[rows, heads:], wide[rows], [len(rows)]), tree
    ).flatten(1)
    expected = attended * torch.sigmoid(gate64)
    er, eg, ev = torch.autograd.grad(expected, (rotated64, gate64, values64), dy.double())
    assert not grad[:, shape.query_size : shape.value_offset].any()
    assert relative(again, gated.double()) <= 1e-2
    return {
        "out": relative(out, attended.detach()),
        "gated": relative(gated, expected.detach()),
        "query": relative(drotated[:, : shape.heads], er[:, : shape.heads]),
        "key": relative(drotated[:, shape.heads :], er[:, shape.heads :]),
        "value": relative(shape.values(grad), ev),
        "gate": relative(grad[:, : shape.query_size], eg),
    }


def assert_within(found: dict[str, float], bar: float) -> None:
    assert max(found.values()) <= bar, {name: f"{value:.1e}" for name, value in found.items()}


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 16), (3, 3, 10), (6, 2, 32)])
def test_shapes(device: torch.device, heads: int, kv_heads: int, dim: int) -> None:
    assert_within(errors(AttentionShape(heads, kv_heads, dim), LENGTHS, device, torch.float32), 3e-6)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_lengths(device: torch.device, length: int) -> None:
    shape = AttentionShape(2, 1, 16)
    assert_within(errors(shape, [length], device, torch.float32), 3e-6)


@pytest.mark.parametrize("shape", [AttentionShape(6, 2, 16), AttentionShape(2, 2, 10)])
def test_documents_that_go_on_from_others(device: torch.device, shape: AttentionShape) -> None:
    assert_within(tree_errors(shape, TREE, branching(TREE, device), torch.float32), 3e-6)


def test_bfloat16_of_documents_that_go_on_from_others(device: torch.device) -> None:
    cut = AttentionCut(rows=64, keys=32, warps=4, stages=1)
    shape, documents = AttentionShape(4, 2, 32), branching(TREE, device)
    assert_within(tree_errors(shape, TREE, documents, torch.bfloat16, cut, BackwardCuts(cut, cut)), 1e-2)


def test_bfloat16(device: torch.device) -> None:
    cut = AttentionCut(rows=64, keys=32, warps=4, stages=1)
    assert_within(errors(AttentionShape(4, 2, 32), LENGTHS, device, torch.bfloat16, cut, BackwardCuts(cut, cut)), 1e-2)


@pytest.mark.parametrize("keys", [16, 64, 128])
def test_values_by_a_kernel_of_their_own(device: torch.device, keys: int) -> None:
    """Also of programs with the keys of two tiles, where a document has an odd number of tiles."""
    wide, shape = AttentionCut(rows=32, keys=keys, warps=4, stages=1), AttentionShape(4, 2, 16)
    cuts = BackwardCuts(wide, EXACT, wide)
    assert_within(errors(shape, LENGTHS, device, torch.float32, EXACT, cuts), 3e-6)
    assert_within(tree_errors(shape, TREE, branching(TREE, device), torch.float32, EXACT, cuts), 3e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("architecture", ["sm80", "sm86", "sm90"])
@pytest.mark.parametrize("shape", [AttentionShape(16, 4, 256), AttentionShape(4, 2, 64)])
def test_the_cuts_of_each_size(device: torch.device, shape: AttentionShape, architecture: str) -> None:
    """That a device has room for."""
    card = limits_of(device).as_on(named(architecture))
    cuts = forward_cut(torch.bfloat16, card), backward_cuts(torch.bfloat16, card)
    assert_within(errors(shape, [1, 64, 129, 500], device, torch.bfloat16, *cuts), 1e-2)
