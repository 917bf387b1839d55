"""Both forms of the gated delta rule against the recurrence in float64, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gated_delta import ChunkLayout, chunk_gated_delta, gates, recurrent_gated_delta

LENGTHS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def inputs(tokens: int, key_heads: int, heads: int, key_dim: int = 12, value_dim: int = 10) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(tokens, key_heads, key_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(tokens, heads, value_dim, generator=generator, dtype=torch.float64)
    g = -torch.rand(tokens, heads, generator=generator, dtype=torch.float64) * 2
    beta = torch.rand(tokens, heads, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.normalize
    return [unit(q, dim=-1) * key_dim**-0.5, unit(k, dim=-1), v, g, beta]


def sequential(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S ← exp(g) S + k ⊗ β (v − exp(g) Sᵀk); o = Sᵀq, in the dtype of the inputs."""
    ratio = v.shape[1] // k.shape[1]
    outputs = []
    for t in range(len(v)):
        key, query = k[t].repeat_interleave(ratio, 0), q[t].repeat_interleave(ratio, 0)
        state = state * g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, key))
        state = state + key[:, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, query))
    return torch.stack(outputs), state


@pytest.mark.parametrize(("key_heads", "heads"), [(2, 4), (3, 3), (1, 5)])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_equal_the_recurrence(length: int, key_heads: int, heads: int) -> None:
    data = inputs(length, key_heads, heads)
    start = torch.randn(1, heads, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, final = sequential(*data, start[0])
    for limit in (8, 32, 64):
        layout = ChunkLayout.build([length], torch.device("cpu"), limit=limit)
        out, state = chunk_gated_delta(*(x.float() for x in data), layout, start.float())
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(state[0].double(), final, atol=2e-5, rtol=0)


def test_packed_segments_are_separate() -> None:
    lengths = [5, 70, 1, 64, 33]
    data = inputs(sum(lengths), 2, 4)
    starts = torch.randn(5, 4, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layout = ChunkLayout.build(lengths, torch.device("cpu"))
    out, states = chunk_gated_delta(*(x.float() for x in data), layout, starts.float())
    fresh, _ = chunk_gated_delta(*(x.float() for x in data), layout)
    begin = 0
    for index, length in enumerate(lengths):
        part = [x[begin : begin + length] for x in data]
        expected, final = sequential(*part, starts[index])
        torch.testing.assert_close(out[begin : begin + length].double(), expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(states[index].double(), final, atol=2e-5, rtol=0)
        expected, _ = sequential(*part, torch.zeros_like(starts[index]))
        torch.testing.assert_close(fresh[begin : begin + length].double(), expected, atol=2e-5, rtol=0)
        begin += length


def test_strong_decay_neither_overflows_nor_divides_by_zero() -> None:
    data = [x.float() for x in inputs(130, 2, 4)]
    data[3] = data[3] * 100
    for tensor in data:
        tensor.requires_grad_()
    out, _ = chunk_gated_delta(*data, ChunkLayout.build([130], torch.device("cpu")))
    out.sum().backward()
    for tensor in (out, *(x.grad for x in data)):
        assert tensor is not None
        assert bool(torch.isfinite(tensor).all())


def test_gradients_equal_those_of_the_recurrence() -> None:
    lengths = [40, 3, 65]
    exact = [x.requires_grad_() for x in inputs(sum(lengths), 2, 4)]
    single = [x.detach().float().requires_grad_() for x in exact]
    weight = torch.randn(sum(lengths), 4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    begin = 0
    total = torch.zeros((), dtype=torch.float64)
    for length in lengths:
        part = slice(begin, begin + length)
        out, _ = sequential(*(x[part] for x in exact), torch.zeros(4, 12, 10, dtype=torch.float64))
        total = total + (out * weight[part]).sum()
        begin += length
    total.backward()
    out, _ = chunk_gated_delta(*single, ChunkLayout.build(lengths, torch.device("cpu")))
    (out * weight.float()).sum().backward()
    for ours, theirs in zip(single, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 1e-5


@pytest.mark.parametrize(("key_heads", "heads"), [(2, 4), (3, 3), (1, 5)])
def test_one_token_of_many_sequences(key_heads: int, heads: int) -> None:
    q, k, v, g, beta = inputs(6, key_heads, heads)
    state = torch.randn(6, heads, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    live = state.float()
    out = recurrent_gated_delta(torch.stack((q, k), 1).float(), v.float(), g.exp().float(), beta.float(), live)
    for row in range(6):
        one = slice(row, row + 1)
        expected, final = sequential(q[one], k[one], v[one], g[one], beta[one], state[row])
        torch.testing.assert_close(out[row].double(), expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(live[row].double(), final, atol=1e-5, rtol=0)


def test_gates() -> None:
    a, b, rate, bias = torch.randn(3, 5), torch.randn(3, 5), -torch.rand(5), torch.randn(5)
    g, beta = gates(a.bfloat16(), b.bfloat16(), rate, bias)
    torch.testing.assert_close(g, rate * torch.log1p((a.bfloat16().float() + bias).exp()))
    torch.testing.assert_close(beta, 1 / (1 + (-b.bfloat16().float()).exp()))
