"""A quantized matrix in training: the gradient of what the forward computes, without keeping what it decoded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from services.engine.models.qwen3_5.training.plain import frozen_linear
from services.engine.models.weights.matrix import quantize


@pytest.mark.parametrize("kind", ["none", "fp8", "int4"])
def test_gradient_is_that_of_the_decoded_matrix(kind: str) -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(48, 128), kind)
    x = torch.randn(5, 128, requires_grad=True)
    upstream = torch.randn(5, 48)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = frozen_linear(x, weight)
    (grad,) = torch.autograd.grad(out, x, upstream)
    torch.testing.assert_close(out, F.linear(x, weight.dense()))
    torch.testing.assert_close(grad, upstream @ weight.dense())
    if kind != "none":
        assert sum(saved) == 0
