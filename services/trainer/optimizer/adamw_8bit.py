"""AdamW whose moments are bytes: blocks of 256 numbers share a scale, and a byte names one of 256 values that lie
closer together the nearer they are to 0 (Dettmers et al., arXiv 2110.02861).
Each step decodes, updates in float32 and encodes again, a few million numbers at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 256
"""Numbers that share a scale."""
SMALL = 4096
"""Parameters of fewer numbers keep float32 moments: norms and biases are no part of what takes memory."""
STATE_BYTES = 2 * (1 + 4 / BLOCK)
"""Bytes that both moments of a number take."""
_AT_ONCE = 2**22
_DECADES = 7


def levels(*, signed: bool) -> Tensor:
    """[256] float32, ascending: values of the bytes, in units of their block's largest magnitude. Each decade below 1
    has half as many as the one above it; signed ones are symmetric around 0."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float64)
        values = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)).tolist()
        found += [*values, *(-value for value in values)] if signed else values
    return torch.tensor(sorted(found), dtype=torch.float32)


def encode(values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers as bytes and scales. Of levels without a sign a number above 0 never becomes 0: AdamW divides by it.

    Args:
        values: [N] float32.
        known: levels() on the same device.

    Returns:
        [N] uint8, and [blocks] float32.
    """
    count = values.numel()
    padded = torch.zeros(-(-count // BLOCK) * BLOCK, device=values.device)
    padded[:count] = values
    blocks = padded.view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    relative = blocks / torch.where(scale > 0, scale, 1.0)[:, None]
    codes = torch.bucketize(relative, (known[1:] + known[:-1]) / 2)
    if known[0] == 0:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.view(-1)[:count].to(torch.uint8), scale


def decode(codes: Tensor, scale: Tensor, known: Tensor) -> Tensor:
    """[N] float32 of what encode() gave."""
    return known[codes.int()] * scale.repeat_interleave(BLOCK)[: codes.numel()]


class AdamW8bit(Optimizer):
    """torch.optim.AdamW with stored moments of a byte a number.

    A state has the names of torch's ("step", "exp_avg", "exp_avg_sq"); moments that are bytes have their scales beside
    them ("exp_avg_scale", "exp_avg_sq_scale").

    Args:
        parameters: float32 tensors that require grad.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        device = parameters[0].device
        self._levels = {"exp_avg": levels(signed=True).to(device), "exp_avg_sq": levels(signed=False).to(device)}

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of zero."""
        state = {"step": torch.zeros(())}
        for name in self._levels:
            if parameter.numel() < SMALL:
                state[name] = torch.zeros_like(parameter)
            else:
                count, device = parameter.numel(), parameter.device
                zero = int((self._levels[name] == 0).nonzero())
                state[name] = torch.full((count,), zero, dtype=torch.uint8, device=device)
                state[f"{name}_scale"] = torch.zeros(-(-count // BLOCK), device=device)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Applies the gradients, without a closure."""
        if closure is not None:
            raise ValueError("a closure is not evaluated")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.new_state(parameter)
                self._update(parameter.view(-1), parameter.grad.reshape(-1), self.state[parameter], group)

    def _update(self, values: Tensor, gradients: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        state["step"] += 1
        for start in range(0, values.numel(), _AT_ONCE):
            piece = slice(start, min(start + _AT_ONCE, values.numel()))
            first, second = (self._moment(state, name, piece) for name in self._levels)
            _adamw(values[piece], gradients[piece], first, second, float(state["step"]), group)
            for name, moment in zip(self._levels, (first, second), strict=True):
                self._store(state, name, piece, moment)

    def _moment(self, state: dict[str, Tensor], name: str, piece: slice) -> Tensor:
        stored = state[name].view(-1)[piece]
        if f"{name}_scale" not in state:
            return stored
        return decode(stored, state[f"{name}_scale"][_blocks(piece)], self._levels[name])

    def _store(self, state: dict[str, Tensor], name: str, piece: slice, moment: Tensor) -> None:
        if f"{name}_scale" in state:  # float32 moments were changed in place
            state[name][piece], state[f"{name}_scale"][_blocks(piece)] = encode(moment, self._levels[name])


def _blocks(piece: slice) -> slice:
    """Blocks of a run of numbers that begins with one."""
    return slice(piece.start // BLOCK, -(-piece.stop // BLOCK))


def _adamw(
    values: Tensor, gradients: Tensor, first: Tensor, second: Tensor, step: float, group: dict[str, Any]
) -> None:
    """One step of torch's AdamW, in place."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    values.mul_(1 - rate * group["weight_decay"])
    first.lerp_(gradients, 1 - beta1)
    second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    scale = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    values.addcdiv_(first, scale, value=-rate / (1 - beta1**step))
