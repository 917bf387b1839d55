"""Environment that figures depend on: commit, versions, hardware, clocks."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("temper", "torch", "triton", "transformers", "numpy", "grpcio")


def environment() -> dict[str, Any]:
    """Date, commit, versions and hardware, the GPU included if there is one."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "gpu": gpu(),
        },
        "load_average": os.getloadavg()[0],
    }


def gpu() -> dict[str, str] | None:
    """Name, driver, clocks and temperature of the first GPU as nvidia-smi has them now; None without one."""
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    line = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0")
    if line is None:
        return None
    return dict(zip(fields, (part.strip() for part in line.split(",")), strict=False))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
