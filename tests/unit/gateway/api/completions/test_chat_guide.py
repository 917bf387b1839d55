"""What the guide on chats names exists. Its bodies are run by tests/e2e/test_guides.py."""

from __future__ import annotations

import re
from pathlib import Path

from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.fields.sampling import ReasoningFields
from services.gateway.settings import GatewaySettings

GUIDE = Path("docs/guides/chat.md").read_text(encoding="utf-8")


def test_names() -> None:
    """Every field and setting that the guide names exists."""
    for setting in re.findall(r"`TEMPER_([A-Z_]+)`", GUIDE):
        assert setting.lower() in GatewaySettings.model_fields, setting
    for field in ("continue_final_message", "add_generation_prompt", "guided_regex", "parallel_tool_calls"):
        assert field in ChatRequest.model_fields
        assert field in GUIDE
    for field in ReasoningFields.model_fields:
        assert field in GUIDE
