"""GPUs of this machine, for its engines: each has one."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Final

from services.common.errors import InvalidRequest

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Names by which CUDA_VISIBLE_DEVICES chooses each of the GPUs that a process may use; none without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    # The driver has counted those of the variable, up to the first that is none.
    named = [name.strip() for name in environment.get(VARIABLE, "").split(",") if name.strip()]
    return named[: count.value] if named else [str(number) for number in range(count.value)]


def spread(engines: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Settings that give each of several engines a GPU of its own; one alone has the first by itself.

    Args:
        gpus: as of visible_gpus(). None: the engines compute on the CPU, or say themselves that they need one.

    Raises:
        InvalidRequest: there are fewer GPUs than engines.
    """
    if engines == 1 or not gpus:
        return [{} for _ in range(engines)]
    if engines > len(gpus):
        there = "there is one" if len(gpus) == 1 else f"there are {len(gpus)}"
        raise InvalidRequest(
            f"--engines {engines}: each needs a GPU of its own, and {there}; --device cpu computes on the CPU",
            param="engines",
        )
    return [{VARIABLE: gpu} for gpu in gpus[:engines]]
