"""Every API that generates says where the session of a request is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_engine_of_a_session_is_told_and_stays(running: Running, path: str) -> None:
    with httpx.Client(base_url=running.url, timeout=PATIENCE, trust_env=False, verify=False) as http:

        def usage(**headers: str) -> dict[str, Any]:
            answer = http.post(path, json={"model": MODEL, **BODIES[path]}, headers=headers)
            assert answer.status_code == 200, answer.text
            counts: dict[str, Any] = answer.json()["usage"]
            return counts

        first, second = usage(**{"x-session-id": "s-1"}), usage(**{"x-session-id": "s-1"})
        assert first["session"]["id"] == "s-1"
        assert first["session"]["engine"] == second["session"]["engine"]
        assert "session" not in usage()
