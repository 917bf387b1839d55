"""Speculation with a chosen share of right draft tokens, for its speed where no trained mtp layer is at hand.

What a draft token costs does not depend on whether it is right; what follows from it does. So the share is imposed on
the device, between sampling and checking: the token sampled before a draft token is replaced by that draft token, or by
another one. The text means nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.gpu.sampling.sample import MaskTensors
    from services.engine.executors.cuda.buffers import LoadedStep
    from services.engine.executors.cuda.runner import CudaRunner
    from services.engine.executors.cuda.speculation import CudaSpeculation, SampledChunks

_DRAWS = 4096


class ChosenAcceptance:
    """Draws that decide whether draft tokens are right.

    Args:
        share: of the draft tokens behind right ones, 0 to 1.
        rows: most rows of a step.
    """

    def __init__(self, speculation: CudaSpeculation, share: float, rows: int, device: torch.device) -> None:
        self._accept = speculation.accept
        generator = torch.Generator().manual_seed(0)
        self._right = (torch.rand(_DRAWS, rows, generator=generator) < share).to(device)
        self._turn = 0

    def accept(
        self,
        step: LoadedStep,
        sampling: Tensor,
        words: Tensor,
        chunks: SampledChunks,
        results: Tensor,
        masks: MaskTensors | None,
    ) -> None:
        """Accepts the tokens of a step behind the draws."""
        if chunks.group > 1:
            self._turn = (self._turn + 1) % _DRAWS
            rows, group = chunks.decodes * chunks.group, chunks.group
            drafts = step.rows.tokens[:rows].view(-1, group)[:, 1:]
            sampled = results[:rows].view(-1, group, results.shape[1])[:, :-1, 0]
            right = self._right[self._turn, :rows].view(-1, group)[:, 1:]
            sampled.copy_(torch.where(right, drafts, drafts ^ 1))
        self._accept(step, sampling, words, chunks, results, masks)


def impose(runner: CudaRunner, share: float) -> None:
    """Makes a share of a runner's draft tokens right from now on.

    Raises:
        ValueError: it draws none.
    """
    speculation = runner._speculation
    if speculation is None:
        raise ValueError("--acceptance needs --set speculative=mtp")
    speculation.accept = ChosenAcceptance(  # type: ignore[method-assign]
        speculation, share, runner._sampled, runner.stream.device
    ).accept
