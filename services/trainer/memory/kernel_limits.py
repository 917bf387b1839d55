"""Kernels of training that do not fit the GPU, as the error of a job or of a session's call."""

from __future__ import annotations

from kernels.gpu.launch.resources import excess_of
from services.common.errors import DoesNotFit


def refusal_of(error: BaseException) -> DoesNotFit | None:
    """Error for whoever asked for the work; None: it has failed of something else. Another attempt on the same GPU
    would fail again."""
    excess = excess_of(error)
    if excess is None:
        return None
    smaller = ", or set TEMPER_DEVICE_LIMITS=sm89 for the engine (smaller cuts)" if excess.smaller_cuts else ""
    return DoesNotFit(f"{excess}: train on another GPU{smaller}")
