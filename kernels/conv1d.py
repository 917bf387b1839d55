"""Depthwise causal convolution with SiLU over packed segments, and its one-token step. References in plain torch.

``y[t] = silu(sum_j weight[j] · x[t - (kernel - 1) + j])`` per channel (Gu & Dao's causal_conv1d). What a segment needs
from its past are its last kernel - 1 inputs: the state. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ConvLayout:
    """Layout of S packed segments in a buffer that has kernel - 1 rows of history before each of them."""

    rows: Tensor
    """[T] int64: buffer row of each input."""
    outputs: Tensor
    """[T] int64: row of each output in the convolution of the whole buffer."""
    history: Tensor
    """[S · (kernel - 1)] int64: buffer rows of the history before each segment."""
    finals: Tensor
    """[S · (kernel - 1)] int64: buffer rows of the last kernel - 1 inputs of each segment."""
    size: int
    segments: int

    @classmethod
    def build(cls, lengths: Sequence[int], kernel: int, device: torch.device) -> ConvLayout:
        """Layout of segments of these lengths, each at least 1, in order and without gaps."""
        past = kernel - 1
        sizes = torch.tensor(lengths, dtype=torch.int64)
        ends = torch.cumsum(sizes + past, 0)
        begins = ends - sizes - past
        span = torch.arange(past)
        segment = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        rows = torch.arange(int(sizes.sum())) + past * (segment + 1)
        return cls(
            rows=rows.to(device),
            outputs=(rows - past).to(device),
            history=(begins[:, None] + span).flatten().to(device),
            finals=(ends[:, None] - past + span).flatten().to(device),
            size=int(ends[-1]),
            segments=len(sizes),
        )


def causal_conv_packed(
    x: Tensor, weight: Tensor, layout: ConvLayout, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolution of packed segments; nothing leaks from one into the next. Differentiable.

    Args:
        x: [T, channels].
        weight: [kernel, channels], same dtype.
        state: [S, channels, kernel - 1] inputs before each segment; None: zeros.

    Returns:
        [T, channels] with SiLU applied, and the new state [S, channels, kernel - 1].
    """
    kernel, channels = weight.shape
    if layout.segments == 1:
        past = x.new_zeros(kernel - 1, channels) if state is None else state[0].t()
        buffer = torch.cat((past.to(x.dtype), x))
    else:
        buffer = x.new_zeros(layout.size, channels).index_copy(0, layout.rows, x)
        if state is not None:
            buffer = buffer.index_copy(0, layout.history, state.transpose(1, 2).reshape(-1, channels).to(x.dtype))
    count = buffer.shape[0] - kernel + 1
    inputs, taps = buffer.float(), weight.float()
    out = inputs[:count] * taps[0]
    for tap in range(1, kernel):
        out = torch.addcmul(out, inputs[tap : tap + count], taps[tap])
    if layout.segments == 1:
        final = buffer[count:].t().unsqueeze(0)
    else:
        out = out.index_select(0, layout.outputs)
        final = buffer.index_select(0, layout.finals).view(layout.segments, kernel - 1, channels).transpose(1, 2)
    return F.silu(out).to(x.dtype), final


def causal_conv_step(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convolution of one token of each of n sequences.

    Args:
        x: [n, channels].
        weight: [kernel, channels], same dtype.
        state: [n, channels, kernel - 1]; fastest if the channels are contiguous.

    Returns:
        [n, channels] with SiLU applied, and the new state [n, channels, kernel - 1].
    """
    window = torch.cat((state.transpose(1, 2), x.unsqueeze(1)), dim=1)
    return F.silu((window.float() * weight.float()).sum(1)).to(x.dtype), window[:, 1:].transpose(1, 2)
