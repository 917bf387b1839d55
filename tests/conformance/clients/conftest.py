"""Fixtures for tests with clients from npm and from PyPI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.clients.lessons import taught
from tests.conformance.clients.place import installed
from tests.conformance.clients.recorder import Recording, recorded
from tests.stack import Stack


@pytest.fixture(scope="session", autouse=True)
def clients() -> None:
    """They are there, in the versions that are pinned."""
    if not installed():
        pytest.fail("the clients are not installed: make clients", pytrace=False)


@pytest.fixture
def recording(stack: Stack) -> Iterator[Recording]:
    """What a client asks of the shared Temper."""
    with recorded(stack.url) as kept:
        yield kept


@pytest.fixture(scope="session")
def lessons(stack: Stack) -> Stack:
    """The shared Temper with an adapter for each agent, by the agent's name."""
    taught(stack.url)
    return stack
