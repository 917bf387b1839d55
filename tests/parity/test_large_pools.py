"""Blocks and slots behind the 2^31st element of their pools: an offset that a kernel computed in 32 bits is outside of
its tensor there. The pools take address space only: of their pages the few that are used get memory."""

from __future__ import annotations

import math
import mmap
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kernels.gpu.configs import KernelConfigs
from kernels.gpu.launch.device import named
from services.engine.scheduler.scheduler import Scheduler
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.bounds import bounds_checked
from tests.parity import fused_models
from tests.parity.fused_models import TINY, cuda_runner, random_adapters, random_model
from tests.parity.test_fused import LIMITS, requests

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret or sys.platform != "linux",
    reason="only the interpreter checks accesses, and only Linux gives address space without memory",
)
_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which mmap names from Python 3.13 on."""
_FAR = 2**31
_BLOCK = 64
_BLOCKS = _FAR // (_BLOCK * TINY.num_kv_heads * TINY.head_dim) + 64
_SLOTS = _FAR // (TINY.linear_value_heads * TINY.linear_key_dim * TINY.linear_value_dim) + 64

_zeros = torch.zeros


def _address_space(*shape: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """torch.zeros(), whose memory is only there once it is touched."""
    sizes = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
    nbytes = math.prod(sizes) * dtype.itemsize
    if nbytes < 2**28:
        return _zeros(sizes, dtype=dtype, **options)
    space = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(space, dtype=dtype).view(sizes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", ["sm80", "sm90"])
def test_last_blocks_and_slots(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill and decodes with adapters compute the same tokens in the last places of large pools as in the first
    ones of small pools."""
    kernels = KernelConfigs(named("sm90").as_on(named(architecture)))
    few = replace(LIMITS, block_size=_BLOCK, num_blocks=32)
    many = replace(few, num_blocks=_BLOCKS, num_slots=_SLOTS)
    monkeypatch.setattr(fused_models, "spoil", lambda cache: None)
    monkeypatch.setattr(torch, "zeros", _address_space)
    tokens = []
    for limits in (few, many):
        model = random_model(TINY, torch.bfloat16, kernels=kernels)
        runner = cuda_runner(model, limits, random_adapters(model, 3))
        scheduler = Scheduler(limits)
        memory = scheduler._memory
        for pool in (memory._blocks, memory._slots):
            pool._free.reverse()  # the last ones first
        asked = requests(70, 2, tokens=3, adapters=(2, 0))
        for request in asked:
            scheduler.add(request)
        with bounds_checked() as checked:
            while scheduler.has_work:
                plan = scheduler.schedule(0.0)
                assert plan is not None
                result = runner.launch(plan).result()
                tokens.append([token.token_id for token in result.tokens])
                scheduler.update(plan, result, 0.0)
        assert checked.launches.keys() >= {"_decode_kernel", "_gated_delta_step_kernel", "_prefill_kernel"}
    half = len(tokens) // 2
    assert tokens[:half] == tokens[half:]
