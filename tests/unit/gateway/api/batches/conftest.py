"""Fixtures of batches as a client of the gateway sends and follows them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.gateway.batch_client import OPTIONS, Batches, connected
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.fake_engine import FakeEngine, says


@pytest.fixture(scope="module")
def _gateway() -> Iterator[Batches]:
    running = Running([FakeEngine()], **OPTIONS)
    running.start()
    yield connected(running)
    running.stop()


@pytest.fixture
def batches(_gateway: Batches) -> Iterator[Batches]:
    _gateway.running.engine.behaviour = says("Hello")
    _gateway.running.engine.requests.clear()
    yield _gateway
    _gateway.running.wait_for(lambda: _gateway.running.inference.admission.in_flight == 0)
