"""Masks of constrained rows on their way to the device: bits, which the sampling kernels read as they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.sampling.draft_tokens import UNWANTED
from kernels.gpu.sampling.sample import MaskTensors
from services.engine.constraints.masks import RowMasks
from services.engine.executors.cuda.stream import Arrival, EngineStream

_ALIGN = 4
"""Words: masks begin at a multiple of 16 bytes, so that every step runs the same variant of a Triton kernel."""
_TURNS = 2
"""Host buffers: one is filled while the device still reads the other."""


class MaskUpload:
    """Used by one thread. Only the masks that a step has are copied."""

    def __init__(self, stream: EngineStream, max_rows: int, vocab: int) -> None:
        self._stream = stream
        self._max_rows = max_rows
        self._width = -(-vocab // 32)
        self._first = -(-max_rows // _ALIGN) * _ALIGN
        words = self._first + max_rows * self._width
        self._device: Tensor = torch.zeros(words, dtype=torch.int32, device=stream.device)
        self._hosts = [stream.host_buffer(words) for _ in range(_TURNS)]
        self._copied = [Arrival(None) for _ in range(_TURNS)]
        self._turn = 0

    def send(self, masks: RowMasks) -> MaskTensors | None:
        """Queues the copy of a step's masks; None if it has none.

        Raises:
            ValueError: the masks are of another vocabulary.
        """
        count = len(masks.rows)
        if not count and not masks.unwanted:
            return None
        if count and masks.bits.shape[1] != self._width:
            raise ValueError(f"masks of {masks.bits.shape[1]} words, the logits need {self._width}")
        self._turn = (self._turn + 1) % _TURNS
        self._copied[self._turn].wait()
        host: npt.NDArray[np.int32] = self._hosts[self._turn].numpy()
        end = self._first + count * self._width
        host[: self._max_rows] = -1
        host[np.asarray(masks.rows, dtype=np.int64)] = np.arange(count)
        host[np.asarray(masks.unwanted, dtype=np.int64)] = UNWANTED
        host[self._first : end] = masks.bits.reshape(-1)
        self._device[:end].copy_(self._hosts[self._turn][:end], non_blocking=True)
        self._copied[self._turn] = self._stream.mark()
        return MaskTensors(self._device[: self._max_rows], self._device[self._first :].view(-1, self._width))
