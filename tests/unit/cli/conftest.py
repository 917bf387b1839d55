"""What all tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from typer import testing
from typer.main import get_command


@pytest.fixture(autouse=True, scope="session")
def commands_are_built_once() -> Iterator[None]:
    """typer's runner builds all commands anew for each line that a test runs, which takes a quarter of a second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(testing, "_get_command", cache(get_command))
        yield
