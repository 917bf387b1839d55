"""RMS normalisation, L2 normalisation and the gated norm of DeltaNet. References in plain torch."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, computed in float32.

    Args:
        x: [..., d] any float dtype.
        weight: float32, broadcastable to x ([d], or [heads, d]). Qwen3.5's norms pass 1 + w.

    Returns:
        [..., d] in x's dtype.
    """
    y = x.float()
    # The shortest chain of cheap operations: at one row their number is the cost (vecdot and F.rms_norm take longer).
    inverse = (y * y).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (y * inverse * weight).to(x.dtype)


def l2_normalize(x: Tensor, scale: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    """``x · scale / sqrt(sum(x²) + eps)`` over the last dimension in float32 (eps inside the root, as in
    flash-linear-attention's l2norm and transformers' modeling_qwen3_5.l2norm).

    Args:
        x: [..., d] any float dtype.
        scale: number or tensor broadcastable to [..., 1].

    Returns:
        [..., d] float32.
    """
    y = x.float()
    return y * ((y * y).sum(-1, keepdim=True).add_(eps).rsqrt_() * scale)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm(x) · silu(gate)``, norm before gate (Qwen3_5RMSNormGated in transformers).

    Args:
        x: [..., d] float32 output of the recurrence.
        gate: same shape, any float dtype.
        weight: [d] float32, plain.

    Returns:
        [..., d] in gate's dtype.
    """
    return (rms_norm(x, weight, eps) * F.silu(gate.float())).to(gate.dtype)
