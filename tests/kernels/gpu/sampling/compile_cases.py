"""The pointwise and sampling kernels at the shape of Qwen3.5-4B, for tests/kernels/hopper.py."""

from __future__ import annotations

from typing import Any

import torch

from kernels.gpu.activations import swiglu
from kernels.gpu.copies.embedding import gather_tokens
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.sampling.sample import PARAMETER_WORDS, ROW_WORDS, MaskTensors, SamplingBuffers, sample_rows

_HIDDEN, _INTERMEDIATE, _VOCAB = 2560, 9216, 248_320


def launches() -> None:
    """Launches every kernel once in each variant."""
    x = torch.zeros(2, _HIDDEN, dtype=torch.bfloat16)
    weight = torch.ones(_HIDDEN)
    slots = torch.zeros(2, dtype=torch.int32)
    for pdl in (False, True):
        rms_norm(x, weight, 1e-6, pdl=pdl)
        rms_norm(x, weight, 1e-6, x, pdl=pdl)
        swiglu(torch.zeros(2, 2 * _INTERMEDIATE, dtype=torch.bfloat16), pdl=pdl)
        gather_tokens(slots, slots, slots, torch.zeros(8, _HIDDEN, dtype=torch.bfloat16))
    step = torch.zeros(3, 2, dtype=torch.int32)
    table = torch.zeros(4, PARAMETER_WORDS, dtype=torch.int32)
    results = torch.zeros(2, ROW_WORDS, dtype=torch.int32)
    buffers = SamplingBuffers.allocate(2, _VOCAB, "cpu")
    words, biases = torch.zeros(1, _VOCAB, dtype=torch.int32), torch.zeros(1, _VOCAB)
    masks = MaskTensors(torch.zeros(2, dtype=torch.int32), torch.zeros(2, _VOCAB // 32, dtype=torch.int32))
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(2, _VOCAB, dtype=dtype)
        every: dict[str, Any] = {"words": words, "biases": biases, "masks": masks}
        for edits in ({}, {"words": words}, {"words": words, "biases": biases}, {"masks": masks}, every):
            sample_rows(logits, step, table, buffers, slots, results, pdl=dtype == torch.float32, **edits)
            sample_rows(
                logits,
                step,
                table,
                buffers,
                slots,
                results,
                nucleus=True,
                selections=1,
                filters=True,
                alternatives=True,
                pdl=dtype == torch.float32,
                **edits,
            )
