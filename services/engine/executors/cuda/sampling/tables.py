"""Sampling parameters on the device, a row for each state slot, written when a slot gets another request.

Requests with penalties, min_tokens or logit_bias have a row of token words as well: how often each token was generated,
which the sampling kernels count on, and marks. Such rows are 4 bytes a token of the vocabulary (8 once a request came
with logit_bias) and are given out from a pool that grows with the need, up to one for each row of a step.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.sampling import rows as layout
from kernels.gpu.sampling.sample import MOST_ALTERNATIVES, PARAMETER_WORDS
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import NO_LIMIT, Chunk

_MIN_TEMPERATURE = 1e-5
"""Smallest temperature, as in services/engine/executors/cpu/sampling_params.py."""
_FIRST_EDIT_ROWS = 4


@dataclass(slots=True)
class _Tenant:
    """The request whose parameters a slot holds."""

    request: Request
    flags: int
    selections: int
    alternatives: bool
    max_output: int
    """See Chunk."""
    edit_row: int | None
    next_count: int
    """Least output count of the next step if the counts on the device go on."""
    used: int
    """Number of the latest step that sampled it."""


@dataclass(frozen=True, slots=True)
class BatchFeatures:
    """Features of the sampling kernels that some row of a batch needs."""

    nucleus: bool
    selections: int
    filters: bool
    edits: bool
    biases: bool
    alternatives: bool
    forced: bool


class SamplingTables:
    """The device tables and which request each slot has there.

    Args:
        eos_token_ids: what min_tokens masks beside a request's own stop tokens.
        num_slots: state slots; 0 is scratch.
        vocab: width of the logits.
        max_rows: most rows of a step; None: as many as slots.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        num_slots: int,
        vocab: int,
        device: torch.device,
        max_rows: int | None = None,
    ) -> None:
        self._eos = frozenset(eos_token_ids)
        self._vocab = vocab
        self._max_rows = max_rows or num_slots - 1
        self._device = device
        self._salt = secrets.randbits(64)
        self._tenants: list[_Tenant | None] = [None] * num_slots
        self._edit_slots: list[int | None] = []
        """The slot of each edit row, None if it is free."""
        self._steps = 0
        self.parameters = torch.zeros(num_slots, PARAMETER_WORDS, dtype=torch.int32, device=device)
        self.words = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self.biases: Tensor | None = None
        """Allocated with the first logit_bias."""

    def seat(self, chunks: Sequence[Chunk]) -> BatchFeatures:
        """Makes the tables hold the requests of a step; writes only what is new, on the current stream.

        Raises:
            RuntimeError: the counts of a request must be made anew while its newest token is unknown.
        """
        self._steps += 1
        fresh = [chunk for chunk in chunks if not self._goes_on(chunk)]
        # After all that go on are marked as in use: their rows are not to be had.
        for chunk in fresh:
            self._tenants[chunk.slot] = self._take_in(chunk)
        if fresh:
            try:
                self._write(fresh)
            except BaseException:
                # What was to be sent may not have reached the device.
                for chunk in fresh:
                    self._tenants[chunk.slot] = None
                raise
        flags = selections = 0
        alternatives = False
        for chunk in chunks:
            tenant = self._tenants[chunk.slot]
            if tenant is not None:
                flags |= tenant.flags
                selections = max(selections, tenant.selections)
                alternatives = alternatives or tenant.alternatives
        return BatchFeatures(
            nucleus=bool(flags & layout.NUCLEUS.value),
            selections=selections,
            filters=bool(flags & layout.FILTERED.value),
            edits=bool(flags & layout.EDITED.value),
            biases=bool(flags & layout.BIASED.value),
            alternatives=alternatives,
            forced=bool(flags & layout.FORCED.value),
        )

    def _goes_on(self, chunk: Chunk) -> bool:
        """True if the slot's row is that of the request, and the counts on the device are those of its tokens."""
        tenant = self._tenants[chunk.slot]
        if (
            tenant is None
            or tenant.request is not chunk.request
            # More than that are draft tokens that were accepted: the device has counted them.
            or (tenant.edit_row is not None and tenant.next_count > chunk.output_count)
        ):
            return False
        tenant.next_count = chunk.output_count + 1
        tenant.used = self._steps
        return True

    def _take_in(self, chunk: Chunk) -> _Tenant:
        params = chunk.request.sampling
        old = self._tenants[chunk.slot]
        row = None if old is None else old.edit_row
        flags = _flags(params, self._vocab)
        if flags & layout.EDITED.value:
            self._leave(chunk.request)
            if row is None:
                row = self._free_edit_row()
                self._edit_slots[row] = chunk.slot
        elif row is not None:
            self._edit_slots[row] = None
            row = None
        selections = 0
        if flags & layout.FILTERED.value:
            top_k, top_p = 0 < params.top_k < self._vocab, params.top_p < 1.0
            selections = 5 if top_k and top_p else 3 if top_k or top_p else 0
        return _Tenant(
            chunk.request,
            flags,
            selections,
            bool(params.top_logprobs),
            chunk.max_output,
            row,
            chunk.output_count + 1,
            self._steps,
        )

    def _leave(self, request: Request) -> None:
        """Takes a request out of the slot that it had before: its counts there are not carried on."""
        for slot, tenant in enumerate(self._tenants):
            if tenant is not None and tenant.request is request:
                self._tenants[slot] = None

    def _free_edit_row(self) -> int:
        """A row nobody has, else one whose request takes no part in this step, else a new one.

        A request that lost its row gets another when it comes back: it missed a step, so its tokens are all known.
        """
        for row, slot in enumerate(self._edit_slots):
            tenant = None if slot is None else self._tenants[slot]
            if slot is None or tenant is None:
                return row
            if tenant.used < self._steps:
                self._tenants[slot] = None
                return row
        rows = len(self._edit_slots)
        self._grow(min(max(_FIRST_EDIT_ROWS, 2 * rows), self._max_rows))
        return rows

    def _grow(self, rows: int) -> None:
        added = rows - len(self._edit_slots)
        self.words = torch.cat([self.words, self.words.new_zeros(added, self._vocab)])
        if self.biases is not None:
            self.biases = torch.cat([self.biases, self.biases.new_zeros(added, self._vocab)])
        self._edit_slots.extend([None] * added)

    def _write(self, chunks: Sequence[Chunk]) -> None:
        rows = np.zeros((len(chunks), PARAMETER_WORDS), dtype=np.int32)
        for row, chunk in zip(rows, chunks, strict=True):
            tenant = self._tenants[chunk.slot]
            if tenant is not None:
                self._fill(row, tenant)
                if tenant.edit_row is not None:
                    self._write_words(tenant.edit_row, chunk)
        slots = self._upload(np.array([chunk.slot for chunk in chunks], dtype=np.int64))
        self.parameters.index_copy_(0, slots, self._upload(rows))

    def _fill(self, row: npt.NDArray[np.int32], tenant: _Tenant) -> None:
        params = tenant.request.sampling
        floats = row.view(np.float32)
        row[layout.FLAGS.value] = tenant.flags
        floats[layout.TEMPERATURE.value] = 1.0 if params.greedy else max(params.temperature, _MIN_TEMPERATURE)
        row[layout.TOP_K.value] = params.top_k if params.top_k < self._vocab else 0
        floats[layout.TOP_P.value] = params.top_p
        floats[layout.LOG_MIN_P.value] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        floats[layout.REPETITION.value] = params.repetition_penalty
        floats[layout.FREQUENCY.value] = params.frequency_penalty
        floats[layout.PRESENCE.value] = params.presence_penalty
        row[layout.MIN_TOKENS.value] = params.min_tokens
        row[layout.EDIT_ROW.value] = tenant.edit_row or 0
        seed = self._seed(tenant.request)
        row.view(np.uint32)[layout.SEED_LOW.value] = seed & 0xFFFFFFFF
        row.view(np.uint32)[layout.SEED_HIGH.value] = seed >> 32
        row[layout.ALTERNATIVES.value] = min(params.top_logprobs or 0, self._vocab, MOST_ALTERNATIVES)
        row[layout.MOST_OUTPUT.value] = tenant.max_output if params.draftable else NO_LIMIT
        stops = sorted(params.stops(self._eos)) if params.draftable else []
        first, most = layout.STOPS.value, layout.MOST_STOPS.value
        if len(stops) > most:
            raise ValueError(f"{len(stops)} tokens that end an answer, at most {most} are looked for")
        row[first : first + most] = [*stops, *[-1] * (most - len(stops))]

    def _write_words(self, row: int, chunk: Chunk) -> None:
        """Counts and marks of a request that comes in or comes back."""
        if len(chunk.output_ids) < chunk.output_count:
            raise RuntimeError(
                f"{chunk.request.request_id}: {chunk.output_count} tokens were generated, {len(chunk.output_ids)} are "
                "known: a request with penalties can only start or change its slot when all are"
            )
        params = chunk.request.sampling
        words: dict[int, int] = {}
        if params.repetition_penalty != 1.0:
            words = dict.fromkeys(chunk.request.prompt_token_ids, layout.IN_PROMPT.value)
        if params.min_tokens > 0:
            for token in params.stops(self._eos):
                words[token] = words.get(token, 0) | layout.MASKED_EARLY.value
        for token in chunk.output_ids[: chunk.output_count]:
            words[token] = words.get(token, 0) + 1
        self.words[row].zero_()
        self._scatter(self.words[row], list(words), np.array(list(words.values()), dtype=np.int32))
        if params.logit_bias and self.biases is None:
            self.biases = torch.zeros(self.words.shape, dtype=torch.float32, device=self._device)
        if self.biases is not None:
            self.biases[row].zero_()
            bias = params.logit_bias
            self._scatter(self.biases[row], list(bias), np.array(list(bias.values()), dtype=np.float32))

    def _scatter(
        self, target: Tensor, tokens: Sequence[int], values: npt.NDArray[np.int32] | npt.NDArray[np.float32]
    ) -> None:
        if tokens:
            index = self._upload(np.array(tokens, dtype=np.int64))
            target.index_copy_(0, index, self._upload(values))

    def _upload(self, values: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _seed(self, request: Request) -> int:
        """The request's own seed, or one that is fixed for this request and unpredictable to others."""
        if request.sampling.seed is not None:
            return request.sampling.seed
        return hash((self._salt, request.request_id, request.arrival)) % 2**64


def _flags(params: SamplingParams, vocab: int) -> int:
    flags = 0
    if params.greedy:
        flags |= layout.GREEDY.value
    elif params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        flags |= layout.FILTERED.value
        if params.top_p < 1.0 and params.min_p == 0.0 and not 0 < params.top_k < vocab:
            flags |= layout.NUCLEUS.value
    if params.penalises or params.min_tokens > 0 or params.logit_bias:
        flags |= layout.EDITED.value
    if params.logit_bias:
        flags |= layout.BIASED.value
    if params.top_logprobs is not None:
        flags |= layout.LOGPROB.value
    if params.forced_ids:
        flags |= layout.FORCED.value
    return flags
