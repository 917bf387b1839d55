"""The fused forward and its runner against the plain ones: same plans, same logits, whatever the caches held."""

from __future__ import annotations

import torch

import tests.kernels.gpu.interpreter  # noqa: F401
from services.engine.limits import SchedulerConfig
from services.engine.request import Request, SamplingParams
from tests.parity.fused_models import TINY, InStep, random_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = SchedulerConfig(max_num_seqs=4, token_budget=80, block_size=16, num_blocks=60, num_slots=12, max_model_len=512)


def requests(*lengths: int, tokens: int = 3) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [
        Request(f"r{n}", tuple(torch.randint(6, 61, (length,), generator=generator).tolist()), sampling, arrival=n)
        for n, length in enumerate(lengths)
    ]


def test_prefill_decode_and_mixed_steps() -> None:
    """More than a tile in one prompt, more rows than the products of few rows take, tokens that only the device
    knows."""
    run = InStep(random_model(TINY, torch.float32), random_model(TINY, torch.float32, DEVICE), LIMITS, pending=True)
    run.run(requests(1, 33, 66, 2), arrivals=1)
    assert run.steps >= 6
