"""truncation "auto" of /v1/responses: what goes of a conversation that does not fit, and what stays."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.gateway.api.responses.test_responses import ROUTE, plain
from tests.unit.gateway.conftest import MODEL, Running

CONTEXT = 512
"""Of the engine, whose tokens are bytes."""


def turn(number: int, size: int = 40) -> list[dict[str, str]]:
    """A question and its answer, each of so many characters."""
    return [{"role": role, "content": f"{role[0]}{number} ".ljust(size, ".")} for role in ("user", "assistant")]


LAST = {"role": "user", "content": "last"}


def read(running: Running) -> str:
    return running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids))


def length(running: Running, messages: list[Any]) -> int:
    return len(running.engine.codec.encode_chat(messages))


@pytest.mark.parametrize("answer", [1, 16, 100, 300])
def test_as_few_go_as_have_to(running: Running, http: httpx.Client, answer: int) -> None:
    told = [entry for number in range(12) for entry in turn(number)]
    system = {"role": "system", "content": "Be kind."}
    body = {"input": [*told, LAST], "instructions": "Be kind.", "max_output_tokens": answer}
    refused = http.post(ROUTE, json={"model": MODEL, **body})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert plain(http, **body, truncation="auto")["truncation"] == "auto"
    right = next(
        left for left in range(len(told) + 1) if length(running, [system, *told[left:], LAST]) + answer <= CONTEXT
    )
    assert 0 < right < len(told)
    assert list(running.engine.requests[-1].prompt_token_ids) == running.engine.codec.encode_chat(
        [system, *told[right:], LAST]
    )
    assert length(running, [system, *told[right - 1 :], LAST]) + answer > CONTEXT


def test_nothing_goes_where_all_fits(running: Running, http: httpx.Client) -> None:
    told = [*turn(0), *turn(1), LAST]
    for body in ({}, {"max_output_tokens": CONTEXT - length(running, told)}):
        plain(http, input=told, truncation="auto", **body)
        assert list(running.engine.requests[-1].prompt_token_ids) == running.engine.codec.encode_chat(told)
        assert plain(http, input=told, **body)["truncation"] == "disabled"


def test_room_for_an_answer_of_no_limit(running: Running, http: httpx.Client) -> None:
    """A quarter of the context, where the prompt alone does not fit."""
    plain(http, input=[*(entry for number in range(12) for entry in turn(number)), LAST], truncation="auto")
    prompt = len(running.engine.requests[-1].prompt_token_ids)
    one = length(running, [LAST, *turn(0)]) - length(running, [LAST, turn(0)[0]])
    assert CONTEXT * 3 // 4 - one < prompt <= CONTEXT * 3 // 4
    assert running.engine.requests[-1].sampling.max_tokens == CONTEXT - prompt


def test_a_call_goes_with_its_results(running: Running, http: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "result " + "x" * 150}
    second = {"type": "function_call_output", "call_id": "d", "output": "second " + "x" * 150}
    both = [call, call | {"call_id": "d"}, result, {"role": "system", "content": "noted"}, second]
    plain(http, input=[*turn(0), *both, *turn(1, 60), LAST], truncation="auto", max_output_tokens=100)
    assert [word in read(running) for word in ("result", "noted", "second", "u1", "last")] == [False] * 3 + [True] * 2


def test_the_question_stays_in_a_long_loop(running: Running, http: httpx.Client) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    for number in range(6):
        items.append({"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": f"r{number} ".ljust(80, ".")})
    plain(http, input=items, truncation="auto", max_output_tokens=50)
    assert "user\nquestion" in read(running)
    kept = [number for number in range(6) if f"r{number} " in read(running)]
    assert kept == list(range(kept[0], 6))
    assert 0 < kept[0] < 6


def test_what_stays_does_not_fit(running: Running, http: httpx.Client) -> None:
    body = {"input": [*turn(0), {"role": "user", "content": "x" * 600}], "truncation": "auto", "max_output_tokens": 5}
    for streamed in (False, True):
        refused = http.post(ROUTE, json={"model": MODEL, **body, "stream": streamed})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert refused.json()["error"]["param"] == "input"


def test_everywhere(running: Running, http: httpx.Client) -> None:
    """Behind a stored response, in the background, in a count."""
    first = plain(http, input=[entry for number in range(3) for entry in turn(number)] + [LAST])
    more = {"input": "x" * 200, "previous_response_id": first["id"], "truncation": "auto", "max_output_tokens": 64}
    second = plain(http, **more)
    tokens = list(running.engine.requests[-1].prompt_token_ids)
    assert len(tokens) + 64 <= CONTEXT
    assert second["usage"]["input_tokens"] == len(tokens)
    counted = http.post(f"{ROUTE}/input_tokens", json={"model": MODEL, **more}).json()
    assert counted["input_tokens"] == len(tokens)
    listed = http.get(f"{ROUTE}/{second['id']}/input_items?limit=100").json()["data"]
    assert len(listed) == 9, "what was given is kept whole"
    job = plain(http, **more, background=True)
    running.wait_for(lambda: http.get(f"{ROUTE}/{job['id']}").json()["status"] == "completed")
    assert list(running.engine.requests[-1].prompt_token_ids) == tokens
