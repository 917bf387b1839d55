"""The bodies in the guide on chats run as they are written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.reasoning import ReasoningFields
from services.gateway.settings import GatewaySettings
from tests.unit.gateway.conftest import Running

GUIDE = Path("docs/guides/chat.md").read_text(encoding="utf-8")
BODIES = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)]


@pytest.mark.parametrize("body", BODIES, ids=[list(body)[-1] for body in BODIES])
def test_body_runs(running: Running, http: httpx.Client, body: dict[str, object]) -> None:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    sampling = running.engine.requests[-1].sampling
    constrained = {"response_format", "structured_outputs", "tool_choice"} & body.keys()
    assert sampling.HasField("constraint") is bool(constrained)
    assert sampling.HasField("thinking") is ("thinking_budget" in body)


def test_names() -> None:
    """Every field and setting that the guide names exists."""
    assert len(BODIES) >= 6
    for setting in re.findall(r"`TEMPER_([A-Z_]+)`", GUIDE):
        assert setting.lower() in GatewaySettings.model_fields, setting
    for field in ("continue_final_message", "add_generation_prompt", "guided_regex", "parallel_tool_calls"):
        assert field in ChatRequest.model_fields
        assert field in GUIDE
    for field in ReasoningFields.model_fields:
        assert field in GUIDE
