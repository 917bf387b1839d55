"""How a pod's engine and trainer share the device, by device."""

from __future__ import annotations

from typing import TypeAlias

import torch

from services.engine.compute_sharing.device_order import StreamGate
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.executors.runner import Runner

Gate: TypeAlias = SliceGate | StreamGate


def build_gate(runner: Runner, device: torch.device, tpot_goal_seconds: float) -> Gate:
    """Where steps are queued on a stream, the order is kept there; where they compute in the caller, on the host."""
    if device.type != "cuda":
        return SliceGate(tpot_goal_seconds)
    # Imported here: a pod without a GPU needs no Triton.
    from services.engine.compute_sharing.device_queue import CudaLane
    from services.engine.executors.cuda.runner import CudaRunner

    if not isinstance(runner, CudaRunner) or (stream := runner.stream.stream) is None:
        raise TypeError(f"steps of a {type(runner).__name__} are not queued on a stream of {device}")
    return StreamGate(tpot_goal_seconds, CudaLane(lambda: stream), CudaLane(torch.cuda.current_stream))
