"""Prometheus' own checks, for tests of rules and queries."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Promtool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Runs promtool. It is Debian's package prometheus, which .ci/tools installs."""
    path = shutil.which("promtool")
    if path is None:
        reason = "promtool is not on PATH: apt-get install prometheus, or see .ci/tools"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [path, *map(str, arguments)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )

    return run
