"""Every kernel compiles for the GPU it is tuned for, at the 4B shape, without spilling registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted(path.parent.name for path in Path(__file__).parent.glob("*/compile_cases.py"))
_SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory a block of sm_90 may use."""


@pytest.mark.parametrize("cases", CASES)
def test_compiles_for_hopper(cases: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper", "--json", f"tests.kernels.gpu.{cases}.compile_cases"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout)
    assert kernels
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= _SHARED_LIMIT, kernel
