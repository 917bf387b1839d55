"""A mixture of experts against its definition, token by token in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.experts import pass_through, route


def test_weights_are_those_of_a_softmax_over_all_divided_by_their_sum() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 9)
    chosen, weights = route(logits, 3)
    for row, own in enumerate(logits.double()):
        likeliest = own.sort(descending=True).indices[:3]
        assert chosen[row].tolist() == likeliest.tolist()
        probabilities = own.softmax(-1)[likeliest]
        torch.testing.assert_close(weights[row].double(), probabilities / probabilities.sum(), atol=1e-6, rtol=0)
    assert route(logits.bfloat16(), 3)[1].dtype == torch.bfloat16


def test_each_token_gets_the_weighted_sum_of_its_experts() -> None:
    torch.manual_seed(1)
    count, hidden, width = 6, 8, 5
    gate_up, down = torch.randn(count, 2 * width, hidden).double(), torch.randn(count, hidden, width).double()
    x, logits = torch.randn(11, hidden).double(), torch.randn(11, count).double()
    logits[:, 4] = -50  # an expert that nobody takes

    def expert(row: Tensor, number: int) -> Tensor:
        gate, up = (gate_up[number] @ row).chunk(2)
        result: Tensor = down[number] @ (torch.nn.functional.silu(gate) * up)
        return result

    chosen, weights = route(logits, 2)
    out = pass_through(x, chosen, weights, lambda r, e: r @ gate_up[e].t(), lambda r, e: r @ down[e].t())
    for row in range(len(x)):
        expected = sum(w * expert(x[row], int(e)) for e, w in zip(chosen[row], weights[row], strict=True))
        torch.testing.assert_close(out[row], expected)
