"""Backwards of norms, activation, convolution and head against autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.gpu.delta.conv1d import conv_prefill
from kernels.gpu.train.activations import swiglu_backward
from kernels.gpu.train.conv1d import conv_backward
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.gated_norm import gated_norm_backward
from kernels.gpu.train.head import token_scores
from kernels.gpu.train.qk_rope import qk_norm_rope, qk_norm_rope_backward
from kernels.gpu.train.rms_norm import rms_norm_backward
from kernels.rope import Rotation, inverse_frequencies
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.train.support import TREE, along, branching, conv64, relative, rms_norm64, rope64

EPS = 1e-6
LENGTHS = [70, 1, 3, 64, 65, 2]
BARS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Relative errors of whole tensors: some roundings of the result's type."""


def normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.mark.parametrize("width", [7, 64, 300])
def test_rms_norm(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, dy, onto = (normal(5, width, seed=seed, device=device, dtype=dtype) for seed in range(3))
    weight = 1 + 0.1 * normal(width, seed=3, device=device)
    out, normed = rms_norm_backward(x, weight, EPS, dy, onto)
    x64 = exact(x)
    y = rms_norm64(x64, weight, EPS)
    (dx,) = torch.autograd.grad(y, x64, dy.double())
    assert relative(normed, y.detach()) <= BARS[dtype]
    assert relative(out, dx + onto.double()) <= BARS[dtype]


@pytest.mark.parametrize("width", [5, 1030])
def test_swiglu(device: torch.device, dtype: torch.dtype, width: int) -> None:
    gate_up = normal(3, 2 * width, seed=0, device=device, dtype=dtype)
    dy = normal(3, width, seed=1, device=device, dtype=dtype)
    x64 = exact(gate_up)
    y = F.silu(x64[:, :width]) * x64[:, width:]
    (dx,) = torch.autograd.grad(y, x64, dy.double())
    out, active = swiglu_backward(gate_up, dy)
    assert relative(active, y.detach()) <= BARS[dtype]
    assert relative(out, dx) <= BARS[dtype]
    again, active_again = swiglu_backward(gate_up, dy, in_place=True)
    assert again is gate_up
    assert active_again is dy
    assert torch.equal(again, out)
    assert torch.equal(active_again, active)
    with pytest.raises(ValueError, match="must be contiguous"):
        swiglu_backward(out, gate_up[:, :width], in_place=True)


@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 10)])
def test_gated_norm(device: torch.device, dtype: torch.dtype, heads: int, dim: int) -> None:
    count = 21
    x, dy = (normal(count, heads * dim, seed=seed, device=device, dtype=dtype) for seed in range(2))
    wide = normal(count, 3 * heads * dim, seed=2, device=device, dtype=dtype)
    gate = wide[:, heads * dim : 2 * heads * dim]
    weight = 1 + 0.1 * normal(dim, seed=3, device=device)
    dwide = torch.zeros_like(wide)
    dx, result = gated_norm_backward(x, gate, weight, EPS, dy, dgate=dwide[:, heads * dim : 2 * heads * dim])
    x64, gate64 = exact(x), exact(gate)
    y = rms_norm64(x64.unflatten(1, (heads, dim)), weight, EPS).flatten(1) * F.silu(gate64)
    ex, eg = torch.autograd.grad(y, (x64, gate64), dy.double())
    assert relative(result, y.detach()) <= BARS[dtype]
    assert relative(dx, ex) <= BARS[dtype]
    assert relative(dwide[:, heads * dim : 2 * heads * dim], eg) <= BARS[dtype]
    assert not dwide[:, : heads * dim].any()
    assert not dwide[:, 2 * heads * dim :].any()
    again = gated_norm_backward(x, gate, weight, EPS, dy, dgate=torch.empty_like(gate), in_place=True)
    assert again[0] is dy
    assert again[1] is x
    assert torch.equal(dy, dx)
    assert torch.equal(x, result)
    with pytest.raises(ValueError, match="must be contiguous"):
        gated_norm_backward(x, gate, weight, EPS, gate, dgate=torch.empty_like(gate), in_place=True)


@pytest.mark.parametrize(("kernel", "channels", "rows"), [(4, 40, 8), (2, 7, 16), (5, 300, 4)])
def test_convolution(device: torch.device, dtype: torch.dtype, kernel: int, channels: int, rows: int) -> None:
    documents = Documents.build(LENGTHS, device)
    wide = normal(sum(LENGTHS), channels + 9, seed=0, device=device, dtype=dtype)
    weight = normal(kernel, channels, seed=1, device=device, dtype=dtype)
    dy = normal(sum(LENGTHS), channels, seed=2, device=device, dtype=dtype)
    out = torch.full_like(wide, 7.0)
    conv_backward(wide, weight, dy, documents, out=out, rows=rows)
    x64 = exact(wide[:, :channels])
    (dx,) = torch.autograd.grad(conv64(x64, weight, LENGTHS), x64, dy.double())
    assert relative(out[:, :channels], dx) <= BARS[dtype]
    assert bool((out[:, channels:] == 7.0).all())


@pytest.mark.parametrize(("kernel", "channels", "rows"), [(4, 40, 8), (2, 7, 16), (5, 300, 4)])
def test_convolution_of_documents_that_go_on_from_others(
    device: torch.device, dtype: torch.dtype, kernel: int, channels: int, rows: int
) -> None:
    documents = branching(TREE, device, past=kernel - 1)
    count = len(documents.positions)
    wide = normal(count, channels + 9, seed=0, device=device, dtype=dtype)
    weight = normal(kernel, channels, seed=1, device=device, dtype=dtype)
    dy = normal(count, channels, seed=2, device=device, dtype=dtype)
    past = torch.full((documents.count, kernel - 1, channels), 5.0, dtype=dtype, device=device)
    assert documents.tree is not None
    documents.tree.past(wide[:, :channels], out=past)
    state = past.clone()
    y = conv_prefill(wide, weight, state, documents.segments, rows=rows)
    out = torch.full_like(wide, 7.0)
    conv_backward(wide, weight, dy, documents, out=out, past=past, rows=rows)
    x64 = exact(wide[:, :channels])
    expected = along(lambda rows: conv64(x64[rows], weight, [len(rows)]), TREE)
    (dx,) = torch.autograd.grad(expected, x64, dy.double())
    assert relative(y, expected.detach()) <= BARS[dtype]
    assert relative(out[:, :channels], dx) <= BARS[dtype]
    assert bool((out[:, channels:] == 7.0).all())
    with pytest.raises(ValueError, match="what comes before"):
        conv_backward(wide, weight, dy, documents, out=out, rows=rows)


@pytest.mark.parametrize(("heads", "dim", "rotary", "scale"), [(3, 16, 8, 1.0), (2, 10, 10, 1.0), (5, 32, 8, 1.14)])
def test_qk_rope(device: torch.device, dtype: torch.dtype, heads: int, dim: int, rotary: int, scale: float) -> None:
    documents = Documents.build(LENGTHS, device)
    count, offset = sum(LENGTHS), 6
    projected = normal(count, offset + heads * dim + 5, seed=0, device=device, dtype=dtype)
    weight = 1 + 0.2 * normal(heads, dim, seed=1, device=device)
    dy = normal(count, heads, dim, seed=2, device=device, dtype=dtype)
    rotation = Rotation(inverse_frequencies(rotary, 1e4).to(device), scale)
    rotated = qk_norm_rope(projected, weight, EPS, rotation, documents.positions, offset=offset)
    out = torch.full_like(projected, 3.0)
    qk_norm_rope_backward(projected, weight, EPS, rotation, documents.positions, dy, offset=offset, out=out)
    columns = slice(offset, offset + heads * dim)
    x64 = exact(projected[:, columns])
    y = rope64(rms_norm64(x64.unflatten(1, (heads, dim)), weight, EPS), documents.positions, rotation)
    (dx,) = torch.autograd.grad(y, x64, dy.double())
    assert relative(rotated, y.detach()) <= BARS[dtype]
    assert relative(out[:, columns], dx) <= BARS[dtype]
    assert bool((out[:, :offset] == 3.0).all())
    assert bool((out[:, offset + heads * dim :] == 3.0).all())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocabulary", "tile"), [(50, 4), (5000, 100)])
def test_head(device: torch.device, dtype: torch.dtype, temperature: float, vocabulary: int, tile: int) -> None:
    # Logits within ±4: rounded to bfloat16 they are off by 2⁻⁹ of themselves, a probability by as much as its logit.
    hidden = (0.2 * normal(11, 24, seed=0, device=device)).to(dtype).requires_grad_()
    head = normal(vocabulary, 24, seed=1, device=device, dtype=dtype)
    targets = torch.randint(vocabulary, (11,), generator=torch.Generator().manual_seed(2)).to(device)
    upstream = normal(11, seed=3, device=device)
    hidden64 = exact(hidden)
    targets[3] = (hidden64[3] @ head.double().t()).argmax()
    expected = torch.log_softmax(hidden64 @ head.double().t() / temperature, -1).gather(1, targets[:, None]).squeeze(1)
    (slope,) = torch.autograd.grad(expected, hidden64, upstream.double())
    result, hits = token_scores(hidden, head, targets, temperature, tile=tile)
    assert hits[3]
    assert hits.tolist() == [bool(z.argmax() == t) for z, t in zip(F.linear(hidden, head), targets, strict=True)]
    (ours,) = torch.autograd.grad(result, hidden, upstream)
    assert relative(result.detach(), expected.detach()) <= BARS[dtype]
    assert relative(ours, slope) <= BARS[dtype]
    with torch.no_grad():
        assert torch.equal(token_scores(hidden, head, targets, temperature, tile=tile).logprobs, result.detach())


def test_head_of_a_certain_token(device: torch.device) -> None:
    """Where the model is nearly sure, the slope is a small difference: it must not be that of rounded numbers."""
    head = normal(60, 16, seed=0, device=device, dtype=torch.bfloat16)
    hidden = (1.2 * head[7:8]).clone().requires_grad_()
    targets = torch.tensor([7], device=device)
    result, _ = token_scores(hidden, head, targets, 1.0)
    (ours,) = torch.autograd.grad(result.sum(), hidden)
    hidden64 = exact(hidden)
    logits = hidden64 @ head.double().t()
    assert float(torch.softmax(logits, -1)[0, 7].detach()) > 0.99
    (slope,) = torch.autograd.grad(torch.log_softmax(logits, -1)[0, 7], hidden64)
    # The logit is near 20, where bfloat16 is up to 2⁻⁴ off, and 1 − p as much of itself.
    assert relative(ours, slope) <= 2**-4


def test_a_temperature_of_zero_is_refused(device: torch.device) -> None:
    hidden, head = normal(2, 4, seed=0, device=device), normal(5, 4, seed=1, device=device)
    with pytest.raises(ValueError, match="above 0"):
        token_scores(hidden, head, torch.zeros(2, dtype=torch.int64, device=device), 0.0)
