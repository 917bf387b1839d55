"""Adapter nudges over a real Valkey."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from services.common.adapters.events import AdapterEvents
from services.common.adapters.names import AdapterVersion
from services.common.errors import Unavailable
from services.common.settings import CommonSettings
from tests.integration.servers import RunningServer


@pytest.fixture
def events(valkey: RunningServer, settings: CommonSettings) -> Iterator[AdapterEvents]:
    events = AdapterEvents(settings)
    yield events
    events.close()


def test_a_nudge_wakes_a_waiter(events: AdapterEvents) -> None:
    events.publish("published", AdapterVersion("m", 1))
    assert events.wait(0.05) is False, "what happened before the first wait is history: the engine reads the pointers"
    timer = threading.Timer(0.2, lambda: events.publish("attached", AdapterVersion("m", 1)))
    timer.start()
    began = time.monotonic()
    assert events.wait(60) is True
    assert 0.1 < time.monotonic() - began < 30
    assert events.wait(0.05) is False
    timer.join()


async def test_publishing_from_asyncio(valkey: RunningServer, settings: CommonSettings) -> None:
    events = AdapterEvents(settings)
    assert events.wait(0.01) is False
    await events.publish_async("detached")
    await events.publish_async("current", "m")
    assert events.wait(30) is True
    assert events.wait(0.01) is False, "several events are one nudge"
    await events.aclose()


def test_an_absent_redis_does_not_raise_or_spin(events: AdapterEvents, valkey: RunningServer) -> None:
    events.wait(0.01)
    with valkey.down():
        began = time.monotonic()
        assert events.wait(0.5) is False
        assert 0.4 < time.monotonic() - began < 30
        with pytest.raises(Unavailable):
            events.publish("published", AdapterVersion("m", 1))
    events.publish("published", AdapterVersion("m", 2))
    assert events.wait(30) is True


def test_closing_ends_a_wait_without_an_error(valkey: RunningServer, settings: CommonSettings) -> None:
    for waited in (0.0, 0.001, 0.003, 0.01, 0.1):  # while it connects, asks, and waits
        events = AdapterEvents(settings)
        results: list[object] = []

        def wait(events: AdapterEvents = events, results: list[object] = results) -> None:
            try:
                results.append(events.wait(120))
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(waited)
        events.close()
        thread.join(30)
        assert results == [False]
