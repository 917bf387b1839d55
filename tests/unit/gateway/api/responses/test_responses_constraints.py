"""/v1/responses whose text or calls have to have a form."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from services.common.pb import engine_pb2
from tests.unit.gateway.api.responses.test_responses import ASK, CALL, ROUTE, WEATHER, plain
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import fails, says


class Colour(BaseModel):
    """What the answer is parsed into."""

    name: str


def test_structured_text(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says('{"name": "blue"}')
    answer = client.responses.parse(model=MODEL, input="A colour?", text_format=Colour)
    assert answer.output_parsed == Colour(name="blue")
    constraint = running.engine.requests[0].sampling.constraint
    assert json.loads(constraint.json_schema)["required"] == ["name"]
    code = engine_pb2.ERROR_CODE_INVALID_REQUEST
    running.engine.behaviour = fails(code, f"{constraint.param}: not supported", param=constraint.param)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.parse(model=MODEL, input="A colour?", text_format=Colour)
    assert refused.value.param == "text.format.schema"
    assert "text.format.schema: not supported" in refused.value.message


def test_forced_calls_and_effort(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says(CALL)
    for choice in ("required", {"type": "function", "name": "weather"}):
        (call,) = plain(http, tools=[WEATHER], tool_choice=choice)["output"]
        assert call["type"] == "function_call"
        assert "weather" in running.engine.requests[-1].sampling.constraint.lark
    running.engine.behaviour = says("hm</think>\n\nYes")
    thought, _ = plain(http, reasoning={"effort": "low"})["output"]
    assert thought["type"] == "reasoning"
    unknown = http.post(ROUTE, json=ASK | {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tool_choice")
