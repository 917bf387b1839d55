"""Benchmarks are commands: what one says of the logs is for its process, which here is that of other tests too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    usual = structlog.get_config()
    yield
    structlog.configure(**usual)
