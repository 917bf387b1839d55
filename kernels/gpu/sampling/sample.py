"""Sampling of a whole batch without a host sync. Reference: services/engine/executors/cpu/sampler.py.

A row of logits is cut into blocks, one program each; the last program of a row to end combines them, so that a batch
without filters is one kernel: it draws a block by its mass, then one of its tokens.

Filters are one threshold a row, as in the reference: the tokens at least as likely as the last one that top_k, then
top_p, let pass. It is found digit by digit, like a radix select, on the distance from the most likely token: a
histogram of counts (top_k) or masses (top_p) in 64-bit integers, whose sum does not depend on the order of the
additions, then the same within the bin where the threshold lies. Bounds from the first kernel (the k-th largest of the
blocks' maxima; the weight below which all tokens together are not needed) spare most blocks and atomics.
Rows with top_p alone first try the winner of the race among all tokens (`kernels.gpu.sampling.nucleus`). A program
whose row needs nothing of its kernel ends at once.

=============  ==========================================  ==========
batch          kernels                                     launches
=============  ==========================================  ==========
plain, greedy  scan                                        1
min_p          scan, race                                  2
top_k          scan, 3 × (select, narrow), race            8
top_p          scan, check, again, check, as top_k         11
both           scan, 5 × (select, narrow), race            12
alternatives   and one more
=============  ==========================================  ==========
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu.sampling import state
from kernels.gpu.sampling.nucleus import again_kernel, check_kernel
from kernels.gpu.sampling.rows import BINS, MOST_DRAFTS, PARAMETERS
from kernels.gpu.sampling.scan import scan_kernel
from kernels.gpu.sampling.select import narrow_kernel, race_kernel, select_kernel
from kernels.gpu.sampling.top import alternatives_kernel

RESULT_WORDS = int(state.RESULT_WORDS.value)
"""int32 words of a row's result: token, bits of sampling_logprob, bits of logprob, flags."""
MOST_ALTERNATIVES = int(state.MOST_ALTERNATIVES.value)
"""A row's result goes on with as many token ids and then as many log-probabilities (bits)."""
ROW_WORDS = RESULT_WORDS + 2 * MOST_ALTERNATIVES
PARAMETER_WORDS = int(PARAMETERS.value)
MOST_DRAFT_TOKENS = int(MOST_DRAFTS.value)

_MIN_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Block sizes and warps of the kernels; measured by benchmarks/tuning/sweep_sampling.py. Results depend on
    ``block`` alone."""

    block: int = 1024
    """Logits of one program, a power of two. Tokens of rows without filters depend on it: the reference's is the
    same."""
    plain_warps: int = 2
    """Warps of the scan in batches without top_p."""
    scan_warps: int = 4
    select_warps: int = 4
    narrow_warps: int = 8
    race_warps: int = 4
    top_warps: int = 4


@dataclass(frozen=True, slots=True)
class SamplingBuffers:
    """Memory that the kernels of a step share. Zero between steps where the kernels count in it."""

    partials: Tensor
    """[rows, 6, blocks] float32: what each block found."""
    floats: Tensor
    """[rows, 8] float32: state of the rows between kernels."""
    integers: Tensor
    """[rows, 16] int64: state of the rows between kernels."""
    tickets: Tensor
    """[rows] int32: programs that are done."""
    masses: Tensor
    """[rows, 2, bins] int64: histograms of the first and the present level."""
    counts: Tensor
    """[rows, 2, bins] int32."""
    vocab: int
    config: SamplingConfig

    @classmethod
    def allocate(
        cls, max_rows: int, vocab: int, device: torch.device | str, config: SamplingConfig = SamplingConfig()
    ) -> SamplingBuffers:
        """Buffers for batches up to ``max_rows`` (57 KiB a row at a vocabulary of 248,320)."""
        block = min(config.block, triton.next_power_of_2(vocab))
        blocks = max(_MIN_BLOCKS, triton.next_power_of_2(triton.cdiv(vocab, block)))

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

        bins = int(BINS.value)
        return cls(
            partials=zeros(int(state.PARTIALS.value), blocks, dtype=torch.float32),
            floats=zeros(int(state.FLOATS.value), dtype=torch.float32),
            integers=zeros(int(state.INTEGERS.value), dtype=torch.int64),
            tickets=zeros(dtype=torch.int32),
            masses=zeros(2, bins, dtype=torch.int64),
            counts=zeros(2, bins, dtype=torch.int32),
            vocab=vocab,
            config=replace(config, block=block),
        )

    @property
    def max_rows(self) -> int:
        return self.tickets.shape[0]


@dataclass(frozen=True, slots=True)
class MaskTensors:
    """Masks of tokens that rows may take, as the kernels read them: 31 KiB a masked row at a vocabulary of 248,320."""

    rows: Tensor
    """[R] int32: the mask of each row, negative for none."""
    bits: Tensor
    """[n, ceil(V / 32)] int32: bit t % 32 of word t // 32 says whether token t is allowed. None is all zeros: a row
    must have a token to take."""

    def check(self, rows: int, vocab: int) -> None:
        """
        Raises:
            ValueError: shapes or types do not fit a batch.
        """
        if (
            self.rows.shape[0] < rows
            or self.bits.shape[1:] != (triton.cdiv(vocab, 32),)
            or {self.rows.dtype, self.bits.dtype} != {torch.int32}
            or not (self.rows.is_contiguous() and self.bits.is_contiguous())
        ):
            raise ValueError(
                f"sampling: masks {tuple(self.bits.shape)} of {tuple(self.rows.shape)} rows, logits [{rows}, {vocab}]"
            )


def sample_rows(
    logits: Tensor,
    step: Tensor,
    table: Tensor,
    buffers: SamplingBuffers,
    last_tokens: Tensor,
    results: Tensor,
    *,
    words: Tensor | None = None,
    biases: Tensor | None = None,
    drafted: Tensor | None = None,
    masks: MaskTensors | None = None,
    nucleus: bool = False,
    selections: int = 0,
    filters: bool = False,
    alternatives: bool = False,
    pdl: bool = False,
) -> None:
    """Samples one token a row; everything stays on the device.

    The keyword arguments say what some row of the batch needs; rows that do not need it are not affected.

    Args:
        logits: [R, V] float32 or bfloat16, rows contiguous, not changed.
        step: [3, R] int32: the state slot of each row (0: padding, nothing is written), its output count and, for the
            requests that bring their tokens, the one to take; of others the third is not read into anything.
        table: [num_slots, 16] int32: the parameters of the request in each slot (`kernels.gpu.sampling.rows`).
        last_tokens: [num_slots] int32, gets the tokens.
        results: [R, 4] or, with alternatives, [R, 44] int32; see RESULT_WORDS.
        words: [E, V] int32 token words of requests with edits: counts of generated tokens and marks. What is drawn is
            counted here, or with ``drafted`` by kernels.gpu.sampling.draft_tokens.accept().
        biases: [E, V] float32 logit_bias.
        drafted: [≥ R, MOST_DRAFTS] int32: draft tokens that each row follows, -1 for none; None: without speculation.
        masks: what rows of constrained requests may take; log-probabilities do not know of it.
        nucleus: a row has top_p and no other filter (it needs 3 selections as well, for the rare case).
        selections: levels of selection: 3 for top_k or top_p, 5 if a row has both.
        filters: a row has top_k, top_p or min_p.
        alternatives: a row wants the most likely tokens.
        pdl: launch each kernel before the one ahead has finished (programmatic dependent launch).

    Raises:
        ValueError: shapes do not fit.
    """
    rows, vocab = logits.shape
    width = results.shape[1]
    if vocab != buffers.vocab or rows > buffers.max_rows or logits.stride(1) != 1:
        raise ValueError(f"sampling: logits {tuple(logits.shape)}, buffers for [{buffers.max_rows}, {buffers.vocab}]")
    if step.shape != (3, rows) or not step.is_contiguous() or results.shape[0] < rows or not results.is_contiguous():
        raise ValueError(f"sampling: {rows} rows, step {tuple(step.shape)}, results {tuple(results.shape)}")
    if width < (ROW_WORDS if alternatives else RESULT_WORDS):
        raise ValueError(f"sampling: results of {width} words do not hold the alternatives")
    if drafted is not None and (drafted.shape[0] < rows or drafted.shape[1:] != (MOST_DRAFT_TOKENS,)):
        raise ValueError(f"sampling: {rows} rows, their draft tokens are {tuple(drafted.shape)}")
    if masks is not None:
        masks.check(rows, vocab)
    if rows == 0:
        return
    config = buffers.config
    batch = state.Batch(rows, step, results, width)
    tables = state.Tables(
        logits=logits,
        logits_stride=logits.stride(0),
        vocab=vocab,
        parameters=table,
        words=words,
        biases=biases,
        drafted=None if words is None else drafted,
        mask_rows=None if masks is None else masks.rows,
        masks=None if masks is None else masks.bits,
        last_tokens=last_tokens,
        partials=buffers.partials,
        floats=buffers.floats,
        integers=buffers.integers,
        tickets=buffers.tickets,
        masses=buffers.masses,
        counts=buffers.counts,
        mass_scale=2.0 ** (62 - (vocab - 1).bit_length()),
    )

    def launch(
        kernel: Any, num_warps: int, *, each_block: bool = True, few_registers: bool = False, **constants: Any
    ) -> None:
        """Launches a program for each block of each row, or for each row: these look at no edits, so that one compiled
        form does for all."""
        kernel[(triton.cdiv(vocab, config.block), rows) if each_block else (rows,)](
            batch,
            tables
            if each_block
            else tables._replace(words=None, biases=None, drafted=None, mask_rows=None, masks=None),
            **constants,
            BLOCK=config.block,
            BLOCKS=buffers.partials.shape[2],
            PDL=pdl,
            num_warps=num_warps,
            # Left alone, what is rare (an exact race, a row's last program) takes registers that keep other programs
            # off the processor.
            maxnreg=64 if few_registers else None,
            launch_pdl=pdl,
            # A fused multiply-add would round the penalties otherwise than the reference does.
            enable_fp_fusion=False,
        )

    def fits(warps: int) -> bool:
        """True if a race needs at most 64 registers a thread."""
        return config.block <= 256 * warps

    if not nucleus:
        plain = words is None and masks is None and config.block <= 512 * config.plain_warps
        launch(scan_kernel, config.plain_warps, few_registers=plain, RACES=False)
    else:
        launch(scan_kernel, config.scan_warps, few_registers=fits(config.scan_warps), RACES=True)
        launch(check_kernel, config.race_warps, LAST=False)
        launch(again_kernel, config.race_warps, few_registers=fits(config.race_warps))
        launch(check_kernel, config.race_warps, LAST=True)
    for _ in range(selections):
        launch(select_kernel, config.select_warps)
        launch(narrow_kernel, config.narrow_warps, each_block=False)
    if filters:
        launch(race_kernel, config.race_warps, few_registers=fits(config.race_warps))
    if alternatives:
        launch(alternatives_kernel, config.top_warps, each_block=False)
