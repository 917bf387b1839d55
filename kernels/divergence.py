"""Divergence of a student's next-token distribution from a teacher's, over the whole vocabulary, without the logits of
all rows at once.

The generalized Jensen–Shannon divergence of GKD (Agarwal et al., arXiv 2306.13649, eq. 1; in TRL
`generalized_jsd_loss`), with s and t the softmax of both sides' logits / temperature and m = β t + (1 − β) s::

    D = β KL(t ‖ m) + (1 − β) KL(s ‖ m),    β = 0: KL(t ‖ s),    β = 1: KL(s ‖ t)

Its derivative in the student's tempered logits is what a tile of them is replaced by, and the product with the head
follows at once: two products a row of the student, one of the teacher, and nothing of the vocabulary's width is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

TILE = 256
"""Rows whose logits exist at once."""


class Divergence(NamedTuple):
    """Divergence of each row."""

    value: Tensor
    """[N] float32: the divergence, differentiable in the student's hidden states."""
    student_kl: Tensor
    """[N] float32: KL(student ‖ teacher), whatever beta is; without gradient."""
    agreed: Tensor
    """[N] bool: both find the same token most likely (of equals, the first)."""


class DivergenceRows(NamedTuple):
    """Partial sums of one tile of logits."""

    value: Tensor
    student_kl: Tensor
    agreed: Tensor
    slope: Tensor
    """[N, vocab]: derivative of ``value`` in the student's tempered logits."""


def check_divergence(student_head: Tensor, teacher_head: Tensor, beta: float, temperature: float) -> None:
    """Raises ValueError if there is no such divergence."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be between 0 and 1, got {beta}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if student_head.shape[0] != teacher_head.shape[0]:
        raise ValueError(f"vocabularies of {student_head.shape[0]} and {teacher_head.shape[0]} tokens do not compare")


def divergence_rows(student: Tensor, teacher: Tensor, beta: float) -> DivergenceRows:
    """The definition.

    Args:
        student, teacher: [N, vocab] tempered logits of one dtype, in which everything is computed.
    """
    s_log, t_log = student.log_softmax(-1), teacher.log_softmax(-1)
    ratio = t_log - s_log
    s, t = s_log.exp(), t_log.exp()
    student_kl = -(s * ratio).sum(-1)
    agreed = student.argmax(-1) == teacher.argmax(-1)
    if beta == 0:
        return DivergenceRows((t * ratio).sum(-1), student_kl, agreed, s - t)
    if beta == 1:
        return DivergenceRows(student_kl, student_kl, agreed, -_centred(s, ratio))
    # log(m / s) and log(t / m), from the ratio: a difference of logarithms would lose what they have in common.
    low = torch.exp(-ratio.abs())
    common = torch.log(torch.where(ratio > 0, beta + (1 - beta) * low, 1 - beta + beta * low))
    mixed = ratio.clamp(min=0) + common
    of_student = -(s * mixed).sum(-1)
    value = beta * (t * (ratio.clamp(max=0) - common)).sum(-1) + (1 - beta) * of_student
    return DivergenceRows(value, student_kl, agreed, (beta - 1) * _centred(s, mixed))


def _centred(s: Tensor, x: Tensor) -> Tensor:
    """s (x − Σ s x), [N, vocab]. Counted from x where s is largest: of a distribution that is nearly one token, that
    token's x is nearly the mean, and their difference would be what rounding leaves of both."""
    x = x - x.gather(-1, s.argmax(-1, keepdim=True))
    return s * (x - (s * x).sum(-1, keepdim=True))


def divergence(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    *,
    beta: float,
    temperature: float,
    give_way: Callable[[], None] = lambda: None,
) -> Divergence:
    """The divergence of each row's two distributions; differentiable in ``hidden`` only.

    Args:
        hidden: [N, H], the student's.
        head: [vocab, H], same dtype.
        teacher_hidden: [N, H'].
        teacher_head: [vocab, H'], same dtype as ``teacher_hidden``.
        beta: 0 to 1.
        temperature: above 0, of both sides.
        give_way: called before each product.

    Raises:
        ValueError: beta, the temperature or the widths of the heads.
    """
    check_divergence(head, teacher_head, beta, temperature)
    wanted = hidden.requires_grad and torch.is_grad_enabled()
    call = (hidden, head, teacher_hidden, teacher_head, beta, temperature, wanted, give_way)
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
        wanted: bool,
        give_way: Callable[[], None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = hidden.shape[0]
        value = torch.empty(count, dtype=torch.float32, device=hidden.device)
        student_kl, agreed = torch.empty_like(value), torch.empty_like(value, dtype=torch.bool)
        slope = torch.empty_like(hidden) if wanted else None
        for begin in range(0, count, TILE):
            rows = slice(begin, begin + TILE)
            give_way()
            teacher = F.linear(teacher_hidden[rows], teacher_head).float() / temperature
            give_way()
            found = divergence_rows(F.linear(hidden[rows], head).float() / temperature, teacher, beta)
            value[rows], student_kl[rows], agreed[rows] = found.value, found.student_kl, found.agreed
            if slope is not None:
                give_way()
                slope[rows] = found.slope.to(head.dtype) @ head
        if slope is not None:
            ctx.save_for_backward(slope)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(student_kl, agreed)
        return value, student_kl, agreed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        scale = (grads[0] / ctx.temperature).unsqueeze(1)
        return (slope.float() * scale).to(slope.dtype), None, None, None, None, None, None, None
