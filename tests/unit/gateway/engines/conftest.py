"""Engines that a pool of the tests has."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.gateway.fake_engine import FakeEngine


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    made = [FakeEngine() for _ in range(3)]
    for engine in made:
        await engine.start()
    yield made
    for engine in made:
        await engine.stop()
