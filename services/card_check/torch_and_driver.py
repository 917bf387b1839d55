"""Whether torch, its CUDA, the driver and the card fit together."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from services.card_check.finding import Finding, failure, ok, warning


@dataclass(frozen=True, slots=True)
class Versions:
    """What is there. CUDA versions are (major, minor)."""

    torch: str
    built_for: tuple[int, int] | None
    """CUDA that torch was built with; None: none."""
    driver: tuple[int, int] | None
    """Newest CUDA that the driver runs; None: no driver."""
    cards: bool
    """True if the machine has a device of NVIDIA's."""
    works: bool
    """True if torch can use one."""

    @classmethod
    def here(cls) -> Versions:
        """Those of this machine."""
        built = torch.version.cuda
        return cls(
            torch=torch.__version__,
            built_for=None if built is None else _pair(built),
            driver=_driver(),
            cards=any(Path("/dev").glob("nvidia[0-9]*")),
            works=torch.cuda.is_available(),
        )


def judge(found: Versions, device: str) -> Finding:
    """Finding for what is there and the device that the settings ask for: "auto", "cpu" or "cuda"."""
    if found.works:
        driver = f", the driver runs CUDA {_text(found.driver)}" if found.driver else ""
        return ok(f"torch {found.torch} with CUDA{driver}")
    bad = failure if device == "cuda" else warning
    if found.cards and found.built_for is None:
        if device == "cpu":
            return ok(f"torch {found.torch} for CPUs, as TEMPER_DEVICE=cpu asks")
        return bad(
            f"there is a GPU, and torch {found.torch} is built for CPUs: nothing runs on it",
            "pip install --force-reinstall torch from PyPI, which has CUDA",
        )
    if found.cards and device != "cpu":
        if found.driver is None:
            return bad(
                f"torch {found.torch} finds no driver for the GPU",
                "install NVIDIA's driver, or give its libraries to the container (--gpus all)",
            )
        if found.built_for is not None and found.built_for > found.driver:
            return bad(
                f"torch {found.torch} needs CUDA {_text(found.built_for)}, the driver has {_text(found.driver)}",
                "install a newer driver, or a torch for an older CUDA",
            )
        return bad(f"torch {found.torch} cannot use the GPU", "python -c 'import torch; torch.cuda.init()' says why")
    if device == "cuda":
        return failure("TEMPER_DEVICE=cuda, and there is no GPU here", "set TEMPER_DEVICE to auto or cpu")
    return ok(f"torch {found.torch}, and no GPU: Temper computes on the CPU")


def _driver() -> tuple[int, int] | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _pair(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
