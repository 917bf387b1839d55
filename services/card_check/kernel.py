"""One kernel, compiled and compared with its reference: where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

import time

import torch

from kernels.rms_norm import rms_norm as reference
from services.card_check.finding import Finding, failure, ok, skipped

_ROWS, _COLUMNS, _EPS = 5, 1000, 1e-6
_TOLERANCE = 1e-5
"""Largest difference in float32: sums in another order."""
_WAY_OUT = (
    "reinstall triton in the version that torch asks for, remove TEMPER_CACHE_DIR/triton, or set TEMPER_DEVICE=cpu"
)


def try_kernel(device: torch.device) -> Finding:
    """Finding for the normalisation kernel on a device."""
    try:
        import triton
    except ModuleNotFoundError:
        if device.type == "cpu":
            return skipped("no kernel was tried: there is no GPU and no Triton, and the CPU needs none")
        return failure("the GPU's kernels need Triton, which is not installed", "pip install 'temper[gpu]'")
    except Exception as error:
        return failure(f"Triton cannot be imported: {_first_line(error)}", _WAY_OUT)
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_ROWS, _COLUMNS, generator=generator).to(device)
    weight = torch.randn(_COLUMNS, generator=generator).to(device)
    try:
        # Imported here: Triton decides then whether it compiles or interprets.
        from kernels.gpu.rms_norm import rms_norm

        found = rms_norm(x, weight, _EPS)
    except Exception as error:
        return failure(f"a kernel does not compile: {_first_line(error)}", _WAY_OUT)
    difference = float((found - reference(x, weight, _EPS)).abs().max())
    if difference > _TOLERANCE:
        return failure(f"a kernel gives other numbers than its reference, by up to {difference:.1e}", _WAY_OUT)
    where = "on the GPU" if device.type == "cuda" else "in its interpreter, for there is no GPU"
    seconds = time.perf_counter() - began
    return ok(
        f"Triton {triton.__version__} {where} gives the reference's numbers within {difference:.0e}, {seconds:.1f} s"
    )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
