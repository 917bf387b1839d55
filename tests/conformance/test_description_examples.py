"""The examples in /openapi.json, sent as they are."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway.api.base.openapi import EXAMPLES
from tests.stack import Stack

# Jobs are submitted, and checked as far as that, in tests/unit/gateway: each would keep the trainer busy here.
_JOBS = ("/v1/train/", "/v1/evaluations")
NAMED = [(path, name) for path, examples in EXAMPLES.items() for name in examples if not path.startswith(_JOBS)]


@pytest.fixture(scope="module")
def described(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{stack.url}/openapi.json", timeout=60, trust_env=False).json()
    return found


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[" ".join(named) for named in NAMED])
def test_an_example_runs(stack: Stack, described: dict[str, Any], path: str, name: str) -> None:
    content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    answer = httpx.post(f"{stack.url}{path}", json=content["examples"][name]["value"], timeout=60, trust_env=False)
    described_status = [int(status) for status in described["paths"][path]["post"]["responses"] if status < "300"]
    assert answer.status_code in described_status, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert "error" not in answer.json() or answer.json()["error"] is None
