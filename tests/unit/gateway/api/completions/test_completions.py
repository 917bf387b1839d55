"""Text completions through the real openai client."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from services.common.pb import engine_pb2
from services.gateway.inference.prompts import text_prompts
from services.gateway.protocol.completions import CompletionRequest
from services.gateway.settings import GatewaySettings
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import says

FINISHED = engine_pb2.FINISH_REASON_LENGTH


def test_defaults(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("x" * 40)
    answer = client.completions.create(model=MODEL, prompt="ab")
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16)
    assert list(running.engine.requests[0].prompt_token_ids) == [97, 98]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([97, 98], [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompt_forms(running: Running, client: openai.OpenAI, prompt: object, expected: list[list[int]]) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=prompt, n=2, max_tokens=20, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert [choice.model_extra["prompt_token_ids"] for choice in answer.choices][::2] == expected
    assert answer.usage.prompt_tokens == sum(map(len, expected))
    assert answer.usage.completion_tokens == 13 * 2 * len(expected)
    assert {choice.model_extra["completion_id"] for choice in answer.choices} == {
        f"{answer.id}:{index}" for index in range(2 * len(expected))
    }


def test_stream_equals_plain(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("größer → ∞", per_update=2)
    options = {"model": MODEL, "prompt": "a", "max_tokens": 50, "logprobs": 3, "echo": None}
    plain = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text == "größer → ∞"
    assert chunks[-1].usage == plain.usage
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for c in chunks if c.choices for item in getattr(c.choices[0].logprobs, field)]
        assert streamed == getattr(plain.choices[0].logprobs, field)
    assert plain.choices[0].logprobs.text_offset[:4] == [0, 1, 2, 2]


def test_echo(running: Running, client: openai.OpenAI) -> None:
    for stream in (False, True):
        answer = client.completions.create(model=MODEL, prompt="say: ", echo=True, max_tokens=50, stream=stream)
        text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
        assert text == "say: Hello, world"


def test_invalid_bytes_become_one_text(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says([97, 0xE2, 0x82, 98, 0xF0, 0x9F])
    plain = client.completions.create(model=MODEL, prompt="a")
    stream = client.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(c.choices[0].text for c in stream) == plain.choices[0].text == "a\ufffdb\ufffd"


def test_stop_at_the_very_end_and_partial_stop(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("abcEN")
    answer = client.completions.create(model=MODEL, prompt="a", stop="END")
    assert answer.choices[0].text == "abcEN"
    stream = client.completions.create(model=MODEL, prompt="a", stop="END", stream=True)
    assert "".join(c.choices[0].text for c in stream) == "abcEN"


def test_min_tokens_holds_stop_strings_off(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("a.b.c.d")
    answer = client.completions.create(model=MODEL, prompt="a", stop=["."], extra_body={"min_tokens": 3})
    assert answer.choices[0].text == "a.b"


def test_answers_are_json_whatever_the_engine_says(running: Running, http: httpx.Client) -> None:
    async def impossible(engine, request, send) -> None:
        update = engine_pb2.Update(request_id=request.request_id, token_ids=[97], finish_reason=FINISHED)
        update.logprobs.append(float("-inf"))
        update.sampling_logprobs.append(float("nan"))
        update.top_logprobs.append(engine_pb2.TopLogprobs(token_ids=[98], logprobs=[float("-inf")]))
        await send(update)

    running.engine.behaviour = impossible
    body = {"model": MODEL, "prompt": "a", "logprobs": 1, "return_token_ids": True}
    plain = http.post("/v1/completions", json=body).text
    stream = http.post("/v1/completions", json=body | {"stream": True}).text
    for text in (plain, stream.split("\n\n")[0].removeprefix("data: ")):
        choice = json.loads(text, parse_constant=pytest.fail)["choices"][0]
        assert choice["logprobs"]["token_logprobs"] == [-9999.0]
        assert choice["sampling_logprobs"] == [None]


@pytest.mark.parametrize(("count", "offloaded"), [(3, False), (4, True)])
async def test_many_short_prompts_are_one_long_one(count: int, offloaded: bool) -> None:
    threads: list[threading.Thread] = []

    def encode(text: str) -> list[int]:
        threads.append(threading.current_thread())
        return [len(text)]

    served = cast(Any, SimpleNamespace(codec=SimpleNamespace(encode=encode)))
    body = CompletionRequest(model=MODEL, prompt=["x" * 10] * count)
    assert await text_prompts(served, body, GatewaySettings(offload_chars=30)) == [[10]] * count
    assert {thread is not threading.main_thread() for thread in threads} == {offloaded}
