"""Launches of the DeltaNet kernels at the 4B shape, for tests.kernels.hopper."""

from __future__ import annotations

import torch

from kernels.gpu.delta.chunk import FEW, MANY, gated_delta_prefill
from kernels.gpu.delta.conv1d import conv_decode, conv_prefill
from kernels.gpu.delta.step import gated_delta_step
from kernels.gpu.delta.verify import gated_delta_verify
from kernels.gpu.delta.waiting_writes import WaitingWrites
from kernels.gpu.segments import Segments
from tests.kernels.gpu.delta.support import mixer


def launches() -> None:
    m = mixer(66, "cpu", key_heads=16, heads=32, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    conv_state = torch.zeros(3, 3, m.conv_dim, dtype=torch.bfloat16)
    state = torch.zeros(3, 32, 128, 128)
    slots = torch.ones(2, dtype=torch.int32)
    waiting = WaitingWrites.allocate(
        3, heads=32, key_dim=128, value_dim=128, room=8, dtype=torch.bfloat16, device="cpu"
    )
    segments = Segments.build([64], [0], [2], [0], "cpu", first_row=2)
    for pdl in (False, True):
        mixed = conv_decode(m.projected[:2], m.conv, conv_state, slots, pdl=pdl)
        for pool in (state, state.bfloat16()):
            for late in (None, False, True):
                here = (mixed, m.projected[:2], *m.parameters(), pool, slots)
                gated_delta_step(*here, waiting=None if late is None else waiting, late=late, pdl=pdl)
    mixed = conv_prefill(m.projected, m.conv, conv_state, segments)
    for config in (FEW, MANY):
        for writes in (None, waiting):
            gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, waiting=writes, config=config)
    for pdl in (False, True):
        for pool in (state, state.bfloat16()):
            gated_delta_verify(mixed, m.projected, *m.parameters(), pool, segments, pdl=pdl)
