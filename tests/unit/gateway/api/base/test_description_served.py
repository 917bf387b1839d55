"""The description of the API, whose making takes seconds, while others are served."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from services.gateway.server import app
from tests.unit.gateway.conftest import Starter


def test_others_are_served_while_it_is_made(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start()
    begun, go_on = threading.Event(), threading.Event()
    made = []

    def hold(description: Any) -> Any:
        made.append(description)
        begun.set()
        assert go_on.wait(20), "nobody was served meanwhile"
        return description

    monkeypatch.setattr(app, "whole_bounds", hold)
    with httpx.Client(base_url=running.url, timeout=60, trust_env=False) as http, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(http.get, "/openapi.json") for _ in range(2)]
        assert begun.wait(20)
        assert http.get("/livez").status_code == 200
        go_on.set()
        answers = [one.result(60) for one in asked]
    assert answers[0].status_code == 200
    assert answers[0].content == answers[1].content
    assert len(made) == 1
