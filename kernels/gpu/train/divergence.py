"""The divergence of a student's and a teacher's next-token distributions, a tile of rows at a time.

Both sides' logits of a tile exist once, in the model's dtype; the derivative takes the place of the student's, and its
product with the head follows at once, as in `head`. Reference and formulas: `kernels.divergence`.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from kernels.divergence import Divergence, check_divergence
from kernels.gpu.elementary import exponential_for

TILE = 384
"""Rows whose logits exist at once, as in `head`: twice 191 MB of bfloat16 at 248,320 tokens."""
_BLOCK = 2048

_FORWARD, _REVERSE, _MIXED = 0, 1, 2
"""KL(teacher ‖ student), KL(student ‖ teacher), or what is between."""


@triton.jit
def _normalizer(base, width, inverse_temperature, BLOCK: tl.constexpr):
    """log Σ exp of a row of tempered logits, and the place of the first of the highest."""
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        z = tl.load(base + first + lane, mask=first + lane < width, other=float("-inf")).to(tl.float32)
        z *= inverse_temperature
        place = tl.where(z > highest, first + lane, place)
        new = tl.maximum(highest, z)
        # A lane that has seen nothing yet: −∞ − −∞ is no number.
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * exponential_for(highest - safe, base.dtype.element_ty) + exponential_for(
            z - safe, base.dtype.element_ty
        )
        highest = new
    most = tl.max(highest, axis=0)
    at = tl.min(tl.where(highest == most, place, 2147483647), axis=0)
    total = tl.sum(total * exponential_for(highest - most, base.dtype.element_ty), axis=0)
    return most + tl.log(total), at


@triton.jit
def _common(ratio, beta, DTYPE: tl.constexpr):
    """Common part for ratio = log(t / s) and m = β t + (1 − β) s: log(m / s) is max(ratio, 0) + this, log(t / m)
    min(ratio, 0) − this."""
    low = exponential_for(-tl.abs(ratio), DTYPE)
    return tl.log(tl.where(ratio > 0, beta + (1.0 - beta) * low, 1.0 - beta + beta * low))


@triton.jit
def _rows_kernel(
    student,
    teacher,
    values,
    student_kls,
    agreed,
    width,
    student_stride,
    teacher_stride,
    inverse_temperature,
    beta,
    KIND: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base, other = student + row * student_stride, teacher + row * teacher_stride
    lane = tl.arange(0, BLOCK)
    dtype: tl.constexpr = student.dtype.element_ty
    of_student, mine = _normalizer(base, width, inverse_temperature, BLOCK)
    of_teacher, theirs = _normalizer(other, width, inverse_temperature, BLOCK)
    reverse = tl.zeros([BLOCK], tl.float32)
    forward = tl.zeros([BLOCK], tl.float32)
    inner = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        inside = first + lane < width
        z = tl.load(base + first + lane, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        y = tl.load(other + first + lane, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        z, y = z - of_student, y - of_teacher
        ratio = tl.where(inside, y - z, 0.0)
        s = exponential_for(z, dtype)
        reverse -= s * ratio
        if KIND == 0:
            forward += exponential_for(y, dtype) * ratio
        if KIND == 2:
            # What is outside has ratio 0, and m = s.
            common = tl.where(inside, _common(ratio, beta, dtype), 0.0)
            inner -= s * (tl.maximum(ratio, 0.0) + common)
            forward += exponential_for(y, dtype) * (tl.minimum(ratio, 0.0) - common)
    kl = tl.sum(reverse, axis=0)
    centre = kl
    value = kl
    if KIND == 0:
        value = tl.sum(forward, axis=0)
    if KIND == 2:
        centre = tl.sum(inner, axis=0)
        value = beta * tl.sum(forward, axis=0) + (1.0 - beta) * centre
    tl.store(values + row, value)
    tl.store(student_kls + row, kl)
    tl.store(agreed + row, (mine == theirs).to(tl.int8))
    if SLOPE:
        for first in range(0, width, BLOCK):
            inside = first + lane < width
            z = tl.load(base + first + lane, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
            y = tl.load(other + first + lane, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
            z, y = z - of_student, y - of_teacher
            s = exponential_for(z, dtype)
            if KIND == 0:
                slope = s - exponential_for(y, dtype)
            elif KIND == 1:
                slope = s * (z - y - centre)
            else:
                mixed = tl.maximum(y - z, 0.0) + _common(y - z, beta, dtype)
                slope = (beta - 1.0) * s * (mixed + centre)
            tl.store(base + first + lane, slope.to(dtype), mask=inside)


def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    result: Divergence,
    *,
    beta: float,
    temperature: float,
    slope: bool,
) -> None:
    """The divergence of each row of logits.

    Args:
        student: [N, vocab], rows contiguous; with ``slope`` overwritten by the derivative in the tempered logits.
        teacher: [N, vocab], rows contiguous.
        result: where it goes; ``agreed`` is [N] int8 here.
    """
    rows, width = student.shape
    _rows_kernel[(rows,)](
        student,
        teacher,
        result.value,
        result.student_kl,
        result.agreed,
        width,
        student.stride(0),
        teacher.stride(0),
        1.0 / temperature,
        beta,
        KIND=_FORWARD if beta == 0 else _REVERSE if beta == 1 else _MIXED,
        SLOPE=slope,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=8,
    )


def divergence(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    *,
    beta: float,
    temperature: float,
    tile: int = TILE,
    give_way: Callable[[], None] = lambda: None,
) -> Divergence:
    """See kernels.divergence.divergence.

    Args:
        tile: rows whose logits exist at once.
    """
    check_divergence(head, teacher_head, beta, temperature)
    wanted = hidden.requires_grad and torch.is_grad_enabled()
    call = (hidden, head, teacher_hidden, teacher_head, beta, temperature, tile, wanted, give_way)
    return Divergence(*_Divergence.apply(*call))  # type: ignore[no-untyped-call]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        beta: float,
        temperature: float,
        tile: int,
        wanted: bool,
        give_way: Callable[[], None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = hidden.shape[0]
        value = torch.empty(count, dtype=torch.float32, device=hidden.device)
        student_kl, agreed = torch.empty_like(value), torch.empty_like(value, dtype=torch.int8)
        slope = torch.empty_like(hidden) if wanted else None
        for begin in range(0, count, tile):
            rows = slice(begin, begin + tile)
            give_way()
            teacher = F.linear(teacher_hidden[rows], teacher_head)
            give_way()
            logits = F.linear(hidden[rows], head)
            into = Divergence(value[rows], student_kl[rows], agreed[rows])
            divergence_rows(logits, teacher, into, beta=beta, temperature=temperature, slope=wanted)
            del teacher
            if slope is not None:
                give_way()
                torch.mm(logits, head, out=slope[rows])
            del logits
        if slope is not None:
            ctx.save_for_backward(slope)
        ctx.temperature = temperature
        same = agreed.bool()
        ctx.mark_non_differentiable(student_kl, same)
        return value, student_kl, same

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        scale = (grads[0] / ctx.temperature).unsqueeze(1)
        return (slope.float() * scale).to(slope.dtype), None, None, None, None, None, None, None, None
