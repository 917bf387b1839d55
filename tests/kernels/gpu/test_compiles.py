"""Every kernel compiles for the GPU it is tuned for, at the 4B shape, without spilling registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = sorted(
    f"tests.kernels.gpu.{path.parent.name}.compile_cases" for path in Path(__file__).parent.glob("*/compile_cases.py")
)
_SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory a block of sm_90 may use."""


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """All kernels, compiled by one process that does not interpret."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper", "--json", *CASES],
        cwd=Path(__file__).parents[3],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    compiled: list[dict[str, Any]] = json.loads(done.stdout)
    return compiled


@pytest.mark.parametrize("cases", CASES)
def test_compiles_for_hopper(cases: str, kernels: list[dict[str, Any]]) -> None:
    compiled = [kernel for kernel in kernels if kernel["module"] == cases]
    assert compiled
    for kernel in compiled:
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= _SHARED_LIMIT, kernel
