"""Routing against the reference, and pairs by expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.experts import route as reference
from kernels.gpu.experts.groups import group
from kernels.gpu.experts.lookahead import Lookahead
from kernels.gpu.experts.routing import route, route_backward
from kernels.gpu.launch.device import named
from tests.kernels.gpu import interpreter  # noqa: F401


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chooses_as_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, 13, device=device) * 3).to(dtype)
    active = torch.randn(5, 20, device=device)
    chosen, weights = reference(logits[:, :-1].float(), 3)
    gate = torch.sigmoid(logits[:, -1:].float())
    expected = active * gate
    routes = route(logits, 3, active=active)
    assert torch.equal(routes.experts, chosen.int())
    torch.testing.assert_close(routes.weights, weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(active, expected)
    with_shared = route(logits, 3, shared=True)
    assert with_shared.count == 13
    assert torch.equal(with_shared.experts[:, :3], routes.experts)
    assert (with_shared.experts[:, 3] == 12).all()
    torch.testing.assert_close(with_shared.weights[:, 3:], gate)


def test_equal_and_lost_scores_still_give_different_experts(device: torch.device) -> None:
    logits = torch.zeros(2, 7, device=device)
    logits[1] = float("nan")
    assert route(logits, 3).experts.tolist() == [[0, 1, 2], [0, 1, 2]]
    with pytest.raises(ValueError, match="7 of 6 experts"):
        route(logits, 7)


@pytest.mark.parametrize("rows", [1, 40])
def test_pairs_are_sorted_by_expert(device: torch.device, rows: int) -> None:
    torch.manual_seed(1)
    routes = route(torch.randn(rows, 7, device=device), 2)
    groups = group(routes)
    flat = routes.experts.flatten()
    for expert in range(6):
        mine = (flat == expert).nonzero().flatten()
        assert groups.counts[expert] == len(mine)
        assert torch.equal(groups.pairs[expert, : len(mine)].long(), mine)
    used = int(((groups.counts + 15) // 16).sum())
    assert used <= groups.tiles(16)


def test_backward_is_autograds(device: torch.device) -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 10, device=device, dtype=torch.float64).requires_grad_()
    active = torch.randn(4, 12, device=device, dtype=torch.float64).requires_grad_()
    weight_grads, active_grad = torch.randn(4, 3, device=device), torch.randn(4, 12, device=device)
    chosen, _ = reference(logits[:, :-1].detach(), 3)
    weights = torch.softmax(logits[:, :-1], -1).gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    gated: Tensor = active * torch.sigmoid(logits[:, -1:])
    ((weights * weight_grads).sum() + (gated * active_grad).sum()).backward()
    plain = logits.detach().float()
    inner = active_grad.clone()
    out = route_backward(plain, route(plain, 3), weight_grads, active.detach().float(), inner)
    assert logits.grad is not None
    assert active.grad is not None
    torch.testing.assert_close(out.double(), logits.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(inner.double(), active.grad, atol=1e-6, rtol=1e-5)


def test_weights_to_ask_for_end_where_the_room_does() -> None:
    first, second = (torch.zeros(4, 8, dtype=torch.bfloat16) for _ in range(2))  # 64 bytes each
    found = Lookahead.of([first, second], 80, named("sm90"))
    assert found is not None
    assert (found.tensors[0] is first, found.sizes, found.bulk) == (True, (64, 16), True)
    assert Lookahead.of([first], 0, named("sm90")) is None
    earlier = Lookahead.of([first, second], 64, named("sm89"))
    assert earlier is not None
    assert (earlier.sizes, earlier.bulk) == ((64,), False)
