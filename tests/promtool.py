"""Prometheus' own checks, for tests of rules and queries."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.missing import missing

Promtool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Runs promtool. It is Debian's package prometheus, which .ci/tools installs."""
    path = shutil.which("promtool")
    if path is None:
        missing("promtool is not on PATH: apt-get install prometheus, or see .ci/tools")

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [path, *map(str, arguments)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )

    return run
