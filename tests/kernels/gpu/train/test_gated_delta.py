"""The gated delta rule's forward over documents and its backward, against autograd token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.gated_delta import _LARGE, _SMALL, FEW, MANY, ScanCut, gated_delta_forward
from kernels.gpu.train.gated_delta_backward import scan_backward
from kernels.gpu.train.gated_delta_gradients import gated_delta_gradients
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.delta.support import Mixer, mixer
from tests.kernels.gpu.train.support import TREE, along, branching, delta64, relative


def ours(m: Mixer, documents: Documents, do: Tensor, cut: ScanCut | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """o, and the gradients in the convolution's output and in b | a."""
    shape = DeltaShape(m.key_heads, m.heads, m.key_dim, m.value_dim)
    mixed = m.projected[:, : m.conv_dim].clone()
    out, tiles, trace = gated_delta_forward(mixed, m.projected, m.negative_a, m.dt_bias, shape, documents, cut=cut)
    write_grads, state_grads = scan_backward(mixed, m.projected, tiles, do, shape, documents, cut=cut)
    projected_grad = torch.zeros_like(m.projected)
    mixed_grad = gated_delta_gradients(
        mixed,
        m.projected,
        m.negative_a,
        m.dt_bias,
        trace,
        do,
        write_grads,
        state_grads,
        shape,
        documents,
        projected_grad=projected_grad,
    )
    gates = m.conv_dim + shape.value_size
    assert not projected_grad[:, :gates].any()
    return out, mixed_grad, projected_grad[:, gates:]


def errors(m: Mixer, lengths: list[int], device: torch.device, cut: ScanCut | None = None) -> dict[str, float]:
    return tree_errors(m, [(length, None) for length in lengths], Documents.build(lengths, device), cut)


def tree_errors(
    m: Mixer, tree: Sequence[tuple[int, int | None]], documents: Documents, cut: ScanCut | None = None
) -> dict[str, float]:
    shape = DeltaShape(m.key_heads, m.heads, m.key_dim, m.value_dim)
    do = torch.randn(len(m.projected), shape.value_size, generator=torch.Generator().manual_seed(9))
    do = do.to(m.projected.device, m.projected.dtype)
    out, mixed_grad, gate_grad = ours(m, documents, do, cut)
    mixed64 = m.projected[:, : m.conv_dim].double().requires_grad_()
    gates64 = m.projected[:, m.conv_dim + shape.value_size :].double().requires_grad_()
    expected = along(
        lambda rows: delta64(mixed64[rows], gates64[rows], m.negative_a, m.dt_bias, shape, [len(rows)]), tree
    )
    dmixed, dgates = torch.autograd.grad(expected, (mixed64, gates64), do.double())
    keys = shape.key_heads * shape.key_dim
    parts = {
        "q": (mixed_grad[:, :keys], dmixed[:, :keys]),
        "k": (mixed_grad[:, keys : 2 * keys], dmixed[:, keys : 2 * keys]),
        "v": (mixed_grad[:, 2 * keys :], dmixed[:, 2 * keys :]),
        "b": (gate_grad[:, : m.heads], dgates[:, : m.heads]),
        "a": (gate_grad[:, m.heads :], dgates[:, m.heads :]),
    }
    return {"o": relative(out, expected.detach())} | {name: relative(x, y) for name, (x, y) in parts.items()}


def assert_within(found: dict[str, float], bar: float) -> None:
    """The decay's gradient, a difference of sums that nearly cancel, may be five times as far off."""
    found = found | {"a": found["a"] / 5}
    assert max(found.values()) <= bar, {name: f"{value:.1e}" for name, value in found.items()}


@pytest.mark.parametrize("length", [1, 2, 31, 63, 64, 65, 128, 129])
def test_lengths(device: torch.device, length: int) -> None:
    assert_within(errors(mixer(length, device, heads=2), [length], device), 1e-5)


@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"), [(3, 3, 12, 10), (1, 3, 8, 40), (2, 8, 16, 16)]
)
def test_packed_documents_of_odd_shapes(
    device: torch.device, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> None:
    lengths = [5, 70, 1, 64, 33]
    m = mixer(sum(lengths), device, key_heads=key_heads, heads=heads, key_dim=key_dim, value_dim=value_dim)
    assert_within(errors(m, lengths, device), 1e-5)


def test_packed_is_separate_bit_by_bit(device: torch.device) -> None:
    lengths = [5, 70, 1, 64]
    m = mixer(sum(lengths), device, heads=2)
    do = torch.randn(sum(lengths), m.heads * m.value_dim, generator=torch.Generator().manual_seed(9)).to(device)
    together = ours(m, Documents.build(lengths, device), do)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        alone = mixer(sum(lengths), device, heads=2)
        object.__setattr__(alone, "projected", m.projected[rows].clone())
        for packed, single in zip(
            together, ours(alone, Documents.build([length], device), do[rows].clone()), strict=True
        ):
            assert torch.equal(packed[rows], single)
        begin += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_that_go_on_from_others(device: torch.device, dtype: torch.dtype) -> None:
    m = mixer(sum(length for length, _ in TREE), device, heads=2, dtype=dtype)
    assert_within(tree_errors(m, TREE, branching(TREE, device)), 1e-5 if dtype == torch.float32 else 1.5e-2)


@pytest.mark.parametrize("alike", [0.9, 0.999])
def test_keys_strongly_alike(device: torch.device, alike: float) -> None:
    """The triangular system is then as ill-conditioned as it gets."""
    assert_within(errors(mixer(130, device, heads=2, alike=alike), [130], device), 2e-4)


def test_a_decay_that_forgets_everything(device: torch.device) -> None:
    m = mixer(70, device, heads=2)
    m.projected[::7, -2:] = 60.0
    assert_within(errors(m, [70], device), 1e-5)


@pytest.mark.parametrize("cut", [FEW, MANY])
def test_bfloat16(device: torch.device, cut: ScanCut) -> None:
    m = mixer(140, device, heads=4, value_dim=64, key_dim=32, dtype=torch.bfloat16)
    assert_within(errors(m, [33, 107], device, cut), 1.5e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("cut", [FEW, MANY, _SMALL, _LARGE])
def test_the_real_shape(device: torch.device, cut: ScanCut, alike: float) -> None:
    lengths = [1, 64, 129, 200]
    m = mixer(
        sum(lengths), device, key_heads=16, heads=32, key_dim=128, value_dim=128, dtype=torch.bfloat16, alike=alike
    )
    assert_within(errors(m, lengths, device, cut), 2e-2)
