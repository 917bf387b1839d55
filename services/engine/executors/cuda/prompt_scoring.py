"""Reads prompts on the device behind a step's layers, without waiting for it: always a whole tile of rows at a time, so
that no number of rows needs a kernel or memory of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.gpu.sampling.row_scores import row_scores
from services.engine.executors.cuda.stream import EngineStream
from services.engine.executors.prompt_rows import ReadRows
from services.engine.models.interface import DeviceForward
from services.engine.requests.prompt_scoring import PromptReport, PromptScores
from services.engine.scheduler.step_plan import Chunk, StepPlan

_MOST_ROWS = 256
"""Rows whose logits exist at once: 127 MB of bfloat16 at 248,320 tokens."""
_LEAST_ROWS = 32
"""Fewer would read the head for too little."""

Reports = Callable[[], Sequence[PromptReport]]


class CudaPromptReader:
    """Used by the loop thread only, on the engine's stream.

    Args:
        vocab: width of the logits.
        max_num_seqs: rows that the sampler takes at most, whose logits the memory plan counts: of a few times as many
            it does not.
    """

    def __init__(self, stream: EngineStream, vocab: int, max_num_seqs: int) -> None:
        self._stream = stream
        self._vocab = vocab
        self._tile = min(_MOST_ROWS, max(_LEAST_ROWS, max_num_seqs))

    def launch(self, forward: DeviceForward, x: Tensor, plan: StepPlan, decodes: int, first_row: int) -> Reports:
        """Queues the reads of a plan and the copy of their results.

        Args:
            x: [T, hidden], what the layers returned; it is read before anything queued later.
            decodes: how many of the chunks come first, a row each.
            first_row: of the batch, where the first chunk behind them begins.

        Returns:
            What makes the reports of the results, once the device has come so far.
        """
        wanted = ReadRows.of(plan.reads, plan.chunks, _offsets(plan.chunks, decodes, first_row))
        count, k = len(wanted.rows), min(wanted.most_alternatives, self._vocab)
        padded = -(-count // self._tile) * self._tile
        ids = np.zeros((2, padded), dtype=np.int64)
        ids[:, :count] = wanted.rows, wanted.targets
        rows, targets = self._send(ids)
        pooled = (len(wanted.pooled), x.shape[1])
        sizes = [padded, padded, padded * k, padded * k, math.prod(pooled)]
        words = torch.empty(sum(sizes), dtype=torch.int32, device=x.device)
        parts = torch.split(words, sizes)
        logprobs, ranks = parts[0].view(torch.float32), parts[1]
        top_ids, top_logprobs = parts[2].view(padded, k), parts[3].view(torch.float32).view(padded, k)
        vectors = parts[4].view(torch.float32).view(pooled)
        for begin in range(0, padded, self._tile):
            tile = slice(begin, begin + self._tile)
            scores = row_scores(forward.logits(x.index_select(0, rows[tile])), targets[tile], k)
            for whole, part in zip((logprobs, ranks, top_ids, top_logprobs), scores, strict=True):
                whole[tile].copy_(part)
        for vector, (begin, end) in zip(vectors, wanted.pooled, strict=True):
            torch.sum(forward.normed(x[begin:end]), 0, dtype=torch.float32, out=vector)
        host = self._fetch(words)

        def read() -> Sequence[PromptReport]:
            cut = [part.numpy() for part in torch.split(host, sizes)]
            scores = PromptScores(
                cut[0][:count].view(np.float32),
                cut[1][:count],
                cut[2].reshape(padded, k)[:count],
                cut[3].view(np.float32).reshape(padded, k)[:count],
            )
            return wanted.reports(scores, cut[4].view(np.float32).reshape(pooled))

        return read

    def warm_up(self, forward: DeviceForward, x: Tensor) -> None:
        """Launches everything once. ``x``: [T, hidden]."""
        rows = torch.zeros(self._tile, dtype=torch.int64, device=x.device)
        row_scores(forward.logits(x.index_select(0, rows)), rows, min(1, self._vocab))
        torch.sum(forward.normed(x), 0, dtype=torch.float32)

    def _send(self, ids: np.ndarray) -> Tensor:
        words = torch.from_numpy(ids)
        if self._stream.stream is None or not ids.size:
            return words.to(self._stream.device)
        return words.pin_memory().to(self._stream.device, non_blocking=True)

    def _fetch(self, words: Tensor) -> Tensor:
        # torch keeps page-locked memory for the next time, and gives none away that a copy still writes to.
        host = torch.empty(words.shape, dtype=words.dtype, pin_memory=self._stream.stream is not None)
        return host.copy_(words, non_blocking=True)


def _offsets(chunks: Sequence[Chunk], decodes: int, first_row: int) -> list[int]:
    offsets = list(range(decodes))
    for chunk in chunks[decodes:]:
        offsets.append(first_row)
        first_row += len(chunk.token_ids)
    return offsets
