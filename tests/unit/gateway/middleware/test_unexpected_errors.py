"""Errors that nobody expected: a bug is a 500 that shows nothing, a process with nothing left says that it is busy."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from services.gateway.core.errors import payload_of
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.middleware.request_context import RequestContext
from tests.stack import PATIENCE


def no_memory() -> None:
    bytearray(2**62)


def no_thread() -> None:
    before = threading.stack_size(2**46)  # more than there are addresses
    try:
        threading.Thread(target=int).start()
    finally:
        threading.stack_size(before)


def no_handle() -> None:
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        os.open("/dev/null", os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


def bug() -> None:
    raise RuntimeError("the secret")


async def answer(fault: Callable[[], None]) -> httpx.Response:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        fault()

    transport = httpx.ASGITransport(RequestContext(app, GatewayMetrics()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=PATIENCE) as client:
        return await client.get("/v1/models")


@pytest.mark.parametrize("fault", [no_memory, no_thread, no_handle])
async def test_nothing_left_is_a_503_that_can_be_tried_again(
    fault: Callable[[], None],
) -> None:
    found = await answer(fault)
    assert found.status_code == 503
    assert found.headers["retry-after"] == "1"
    assert found.json()["error"]["code"] == "overloaded"
    assert "memory, thread or file handle" in found.json()["error"]["message"]


async def test_a_bug_is_a_500_that_shows_nothing() -> None:
    found = await answer(bug)
    assert found.status_code == 500
    assert found.json()["error"]["code"] == "internal_error"
    assert "secret" not in found.text
    assert found.json() == payload_of(RuntimeError("the secret"))
