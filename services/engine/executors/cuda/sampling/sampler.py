"""Samples on the GPU: the same tokens as services/engine/executors/cpu/sampler.py, without waiting for the device.

A step is three calls: ``prepare`` on the host, before or while the model runs; ``launch``, which only enqueues kernels
and leaves the tokens in ``last_tokens``, where the next step's embedding finds them; and ``read``, after the runner has
copied the results to the host and waited for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.sampling.sample import (
    MOST_ALTERNATIVES,
    RESULT_WORDS,
    ROW_WORDS,
    MaskTensors,
    SamplingBuffers,
    SamplingConfig,
    sample_rows,
)
from services.engine.executors.cuda.sampling.tables import BatchFeatures, SamplingTables
from services.engine.executors.rng import BLOCK
from services.engine.requests.outputs import SampledToken
from services.engine.scheduler.step_plan import Chunk

_RESULTS = 4
"""Result buffers in turn: one more than the steps whose results may be unread, and some to spare."""
_ERROR, _HAS_LOGPROB = 1, 2


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Host-side inputs of a step's sampling."""

    step: npt.NDArray[np.int32]
    """[3, R]: the state slot and the output count of each row, and the token it is to take, -1 where one is drawn. The
    runner may copy it to the device with its other buffers and give the copy to ``launch``."""
    features: BatchFeatures


@dataclass(frozen=True, slots=True)
class DeviceResults:
    """The results of a step, valid until the kernels of the fourth step after it."""

    words: Tensor
    """[R, 4] int32, or [R, 44] if a row wants alternatives: what to copy to the host."""


class CudaSampler:
    """Batched sampling on the device. Used by the loop thread only, on one stream.

    Args:
        eos_token_ids: what min_tokens masks beside a request's own stop tokens.
        num_slots: state slots; 0 is scratch.
        vocab: width of the logits.
        max_rows: most rows of a step.
        config: how the kernels are cut; None: as measured best.
        pdl: launch kernels before the one ahead has finished.
        speculative: a slot may have several rows in a step, of which the first ones count: ``last_tokens`` is left to
            kernels.gpu.sampling.draft_tokens.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        num_slots: int,
        vocab: int,
        max_rows: int,
        device: torch.device,
        *,
        config: SamplingConfig | None = None,
        pdl: bool = False,
        speculative: bool = False,
    ) -> None:
        self._device = device
        self.max_rows = max_rows
        self._pdl = pdl
        self._tables = SamplingTables(eos_token_ids, num_slots, vocab, device, max_rows)
        self._buffers = SamplingBuffers.allocate(max_rows, vocab, device, config or SamplingConfig(BLOCK))
        self._results = [torch.zeros(max_rows * ROW_WORDS, dtype=torch.int32, device=device) for _ in range(_RESULTS)]
        self._turn = 0
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """[num_slots]: the token sampled last for each state slot."""
        self._newest = torch.zeros_like(self.last_tokens) if speculative else self.last_tokens

    @property
    def parameters(self) -> Tensor:
        """[num_slots, PARAMETER_WORDS] int32: the parameters of the request in each slot."""
        return self._tables.parameters

    @property
    def words(self) -> Tensor:
        """[E, V] int32: token words of the requests that have them; others than before when their number grows."""
        return self._tables.words

    def prepare(self, chunks: Sequence[Chunk], group: int = 1) -> SampleRows:
        """Sampling inputs of the chunks that sample, in row order; enqueues copies only for requests that are new.

        Args:
            group: rows of each chunk; those at its end that it has no tokens for get slot 0.
        """
        if len(chunks) * group > self.max_rows:
            raise ValueError(f"{len(chunks) * group} rows to sample, the most is {self.max_rows}")
        features = self._tables.seat(chunks)
        columns = np.empty((3, len(chunks), 1), dtype=np.int32)
        columns[0, :, 0] = [chunk.slot for chunk in chunks]
        columns[1, :, 0] = [chunk.output_count for chunk in chunks]
        columns[2, :, 0] = [chunk.forced_id for chunk in chunks] if features.forced else -1
        if group == 1:
            return SampleRows(columns[:, :, 0], features)
        rows = np.repeat(columns, group, axis=2)
        place = np.arange(group, dtype=np.int32)
        rows[1] += place
        rows[0][place >= np.array([chunk.sampled_rows for chunk in chunks])[:, None]] = 0
        return SampleRows(rows.reshape(3, -1), features)

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        rows: SampleRows,
        step: Tensor | None = None,
        masks: MaskTensors | None = None,
        drafted: Tensor | None = None,
    ) -> DeviceResults:
        """Enqueues the sampling of a step.

        Args:
            logits: [R, V] float32 or bfloat16, not changed. R may be larger than the number of chunks if ``step`` is
                given, with slot 0 for the rows beyond.
            step: [3, R] int32 on the device, what ``rows.step`` says; None: copied here.
            masks: of constrained rows; None: no row has one.
            drafted: draft tokens that each row follows, see sample_rows(); None: without speculation.
        """
        if step is None:
            step = torch.from_numpy(rows.step)
            if self._device.type == "cuda":
                step = step.pin_memory().to(self._device, non_blocking=True)
        features = rows.features
        width = ROW_WORDS if features.alternatives else RESULT_WORDS
        words = self._results[self._turn][: logits.shape[0] * width].view(-1, width)
        self._turn = (self._turn + 1) % _RESULTS
        sample_rows(
            logits,
            step,
            self._tables.parameters,
            self._buffers,
            self._newest,
            words,
            words=self._tables.words if features.edits else None,
            biases=self._tables.biases if features.biases else None,
            drafted=drafted,
            masks=masks,
            nucleus=features.nucleus,
            selections=features.selections,
            filters=features.filters,
            alternatives=features.alternatives,
            pdl=self._pdl,
        )
        return DeviceResults(words)

    def read(self, words: Tensor) -> list[SampledToken]:
        """The tokens of a step.

        Args:
            words: ``DeviceResults.words`` on the host, [R, 4] or [R, 44], without padding rows.

        Returns:
            One a row. A row with NaN or infinite logits has ``error``; the others are not affected.
        """
        table = words.numpy()
        floats = table.view(np.float32)
        flags = table[:, 3].tolist()
        results = list(map(SampledToken, table[:, 0].tolist(), floats[:, 1].tolist()))
        for row, flag in enumerate(flags):
            if flag & _ERROR:
                results[row] = SampledToken(0, 0.0, error="the model produced logits that are not finite numbers")
            elif flag & _HAS_LOGPROB:
                end = RESULT_WORDS + (flag >> 8)
                results[row] = SampledToken(
                    results[row].token_id,
                    results[row].sampling_logprob,
                    float(floats[row, 2]),
                    table[row, RESULT_WORDS:end].tolist(),
                    floats[row, RESULT_WORDS + MOST_ALTERNATIVES : end + MOST_ALTERNATIVES].tolist(),
                )
        return results
