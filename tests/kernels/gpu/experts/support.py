"""Random experts of every kind, and what they make of rows in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.experts.routing import Routes
from kernels.gpu.linear.skinny import Weight
from kernels.quantize import Fp8Weight, dequantize_fp8, dequantize_int4, quantize_fp8, quantize_int4


def stored(dense: Tensor, kind: str) -> Weight:
    if kind == "none":
        return dense
    return quantize_fp8(dense) if kind == "fp8" else quantize_int4(dense)


def exact(weight: Weight) -> Tensor:
    """In float64, what is multiplied."""
    if isinstance(weight, Tensor):
        return weight.double()
    if isinstance(weight, Fp8Weight):
        return dequantize_fp8(weight, torch.float32).double()
    return dequantize_int4(weight, torch.float32).double()


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer, the shared one of the same shape beside them."""

    gate_up: Weight
    down: Weight
    shared: tuple[Weight, Weight]
    count: int

    @classmethod
    def random(cls, count: int, hidden: int, size: int, kind: str, dtype: torch.dtype, device: torch.device) -> Experts:
        def made(rows: int, inputs: int) -> Weight:
            return stored((torch.randn(rows, inputs, device=device) * inputs**-0.5).to(dtype), kind)

        shared = made(2 * size, hidden), made(hidden, size)
        return cls(made(count * 2 * size, hidden), made(count * hidden, size), shared, count)

    def both(self, expert: int) -> tuple[Tensor, Tensor]:
        """gate | up and down of an expert in float64; of number ``count`` the shared one's."""
        if expert == self.count:
            return exact(self.shared[0]), exact(self.shared[1])
        gate_up, down = (exact(weight) for weight in (self.gate_up, self.down))
        return gate_up.view(self.count, -1, gate_up.shape[1])[expert], down.view(self.count, -1, down.shape[1])[expert]

    def reference(self, x: Tensor, routes: Routes) -> Tensor:
        """[T, hidden] float64: the weighted sum for each row."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        matrices = [self.both(expert) for expert in range(self.count + 1)]
        for row in range(len(x)):
            for expert, weight in zip(routes.experts[row].tolist(), routes.weights[row].double(), strict=True):
                gate_up, down = matrices[expert]
                gate, up = (gate_up @ x[row].double()).chunk(2)
                out[row] += weight * (down @ (torch.nn.functional.silu(gate) * up))
        return out
