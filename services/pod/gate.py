"""How a pod's engine and trainer share the device, by device."""

from __future__ import annotations

from typing import TypeAlias

import torch

from services.engine.gate import SliceGate
from services.engine.ports import Runner
from services.engine.stream_gate import StreamGate

Gate: TypeAlias = SliceGate | StreamGate


def build_gate(runner: Runner, device: torch.device, tpot_goal_seconds: float) -> Gate:
    """Where steps are queued on a stream, the order is kept there; where they compute in the caller, on the host."""
    if device.type != "cuda":
        return SliceGate(tpot_goal_seconds)
    # Imported here: a pod without a GPU needs no Triton.
    from services.engine.cuda.lane import CudaLane
    from services.engine.cuda.runner import CudaRunner

    if not isinstance(runner, CudaRunner) or (stream := runner.stream.stream) is None:
        raise TypeError(f"steps of a {type(runner).__name__} are not queued on a stream of {device}")
    return StreamGate(tpot_goal_seconds, CudaLane(lambda: stream), CudaLane(torch.cuda.current_stream))
