"""Fixtures for tests of the whole system."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One running Temper for all tests that leave it as they found it (their own adapters, nothing attached)."""
    with Stack(tmp_path_factory.mktemp("stack") / "data") as running:
        yield running
