"""Log-probabilities of prompts in completions and chats, in OpenAI's and in vLLM's form."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from services.gateway.protocol.completions import CompletionResponse
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import says
from tests.unit.gateway.reading_engine import logprob, rank, reads, top_ids

CHAT = [{"role": "user", "content": "Hi"}]


def own(prompt: bytes) -> list[float | None]:
    return [None, *(logprob(token, place) for place, token in enumerate(prompt) if place)]


def test_echo_with_logprobs(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = reads(says("xy"))
    prompt = "größe of"
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 9}
    choice = client.completions.create(**options).choices[0]
    assert choice.text == "größe ofxy"
    told, raw = choice.logprobs, prompt.encode()
    count = len(raw)
    assert told.token_logprobs == [*own(raw), -0.5, -0.5, -0.5], "the end token counts, as lm-eval cuts it off"
    assert told.tokens[-1] == "<|im_end|>"
    assert len(told.tokens) == len(told.top_logprobs) == len(told.text_offset) == count + 3
    # Both bytes of a letter begin where it does.
    assert told.text_offset == [0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10]
    assert told.top_logprobs[0] is None
    assert told.top_logprobs[1] == {"A": -8.0, "B": -9.0, "r": logprob(ord("r"), 1)}
    assert told.top_logprobs[6] == {"e": logprob(ord("e"), 6), "A": -9.0}
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for chunk in chunks for item in getattr(chunk.choices[0].logprobs, field)]
        assert streamed == getattr(told, field)


def test_only_the_prompt(running: Running, client: openai.OpenAI) -> None:
    """max_tokens=0, several prompts and choices, whole and streamed; nothing of the engine's token shows."""
    running.engine.behaviour = reads()
    options: dict[str, Any] = {"model": MODEL, "prompt": [[97, 98], [120, 121, 122]], "echo": True, "max_tokens": 0}
    options |= {"logprobs": 0, "n": 2, "extra_body": {"return_token_ids": True}}
    answer = client.completions.create(**options)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "xyz", "xyz"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert [choice.logprobs.token_logprobs for choice in answer.choices] == [own(b"ab")] * 2 + [own(b"xyz")] * 2
    assert answer.choices[0].logprobs.top_logprobs is None
    assert answer.choices[3].model_extra["token_ids"] == answer.choices[3].model_extra["sampling_logprobs"] == []
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 0)
    asked = {request.request_id: request for request in running.engine.requests}
    assert [asked[f"{answer.id}:{n}"].HasField("prompt_logprobs") for n in range(4)] == [True, False, True, False]
    assert not any(request.keep_rollout for request in asked.values())
    streamed: dict[int, list[Any]] = {}
    for chunk in client.completions.create(**options, stream=True):
        streamed.setdefault(chunk.choices[0].index, []).append(chunk.choices[0])
    for index, choices in streamed.items():
        assert "".join(choice.text for choice in choices) == answer.choices[index].text
        assert choices[0].logprobs.token_logprobs == answer.choices[index].logprobs.token_logprobs
        assert choices[-1].finish_reason == "length"
    assert sorted(streamed) == [0, 1, 2, 3]


def test_without_logprobs_nothing_is_asked_of_the_prompt(running: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="ab", echo=True, max_tokens=0)
    assert answer.choices[0].text == "ab"
    client.completions.create(model=MODEL, prompt="ab", logprobs=2)
    assert not any(request.HasField("prompt_logprobs") for request in running.engine.requests)


def test_prompt_logprobs_of_a_completion(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = reads()
    answer = client.completions.create(model=MODEL, prompt="azb", logprobs=3, extra_body={"prompt_logprobs": 2})
    first, second, third = answer.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    assert second == {
        "65": {"logprob": -8.0, "rank": 1, "decoded_token": "A"},
        "66": {"logprob": -9.0, "rank": 2, "decoded_token": "B"},
        "122": {"logprob": logprob(122, 1), "rank": rank(122), "decoded_token": "z"},
    }
    assert list(map(int, third)) == top_ids(98, 2)
    assert third["98"] == {"logprob": logprob(98, 2), "rank": 1, "decoded_token": "b"}
    assert len(answer.choices[0].logprobs.tokens) == 12, "those of the text stand alone"


def test_both_forms_with_as_many_alternatives_as_each_wants(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = reads()
    answer = client.completions.create(
        model=MODEL, prompt="az", echo=True, logprobs=3, max_tokens=0, extra_body={"prompt_logprobs": 1}
    )
    assert running.engine.requests[0].prompt_logprobs == 3
    assert list(answer.choices[0].logprobs.top_logprobs[1]) == ["A", "B", "C", "z"]
    assert list(answer.choices[0].model_extra["prompt_logprobs"][1]) == ["65", "122"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"logprobs": 2, "prompt_logprobs": 1, "n": 2, "return_token_ids": True},
        {"stream": True, "echo": True, "logprobs": 1, "return_token_ids": True},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
    ],
)
def test_answers_are_as_described(running: Running, http: httpx.Client, change: dict[str, Any]) -> None:
    running.engine.behaviour = reads()
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": ["ab", "c"], **change})
    if "stream" not in change:
        CompletionResponse.model_validate_json(answer.content, strict=True)
        return
    *chunks, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    for chunk in chunks:
        CompletionResponse.model_validate_json(chunk.removeprefix("data: "), strict=True)
    assert len(chunks) >= 2


def test_prompt_logprobs_of_a_chat(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = reads()
    running.engine.attached, running.engine.cached_tokens = "a@3", 0
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        n=2,
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )
    prompt = answer.model_extra["prompt_token_ids"]
    told = answer.model_extra["prompt_logprobs"]
    assert len(told) == len(prompt)
    assert [list(entry) for entry in told[1:]] == [[str(token)] for token in prompt[1:]]
    assert told[-1][str(prompt[-1])]["logprob"] == logprob(prompt[-1], len(prompt) - 1)
    assert answer.choices[0].message.content == answer.choices[1].message.content == "Hello, world"
    assert [choice.model_extra["adapter"] for choice in answer.choices] == ["a@3", "a@3"]


@pytest.mark.parametrize(
    ("route", "body", "param", "says"),
    [
        ("completions", {"max_tokens": 0}, "max_tokens", "echo"),
        ("completions", {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "at most 0"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs", "0"),
        ("completions", {"suffix": "end"}, "suffix", "not supported"),
        ("completions", {"best_of": 2}, "best_of", "ranked"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ],
)
def test_refusals(http: httpx.Client, route: str, body: dict[str, Any], param: str, says: str) -> None:
    text = {"prompt": "ab"} if route == "completions" else {"messages": [{"role": "user", "content": "ab"}]}
    answer = http.post(f"/v1/{route}", json={"model": MODEL, **text, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]


def test_the_limit_of_an_answer(start: Starter) -> None:
    """By what is asked for, not by what comes: before an engine has it."""
    running = start(max_prompt_logprobs=12)
    running.engine.behaviour = reads()
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        for route, body, param in (
            ("completions", {"prompt": "abcde", "prompt_logprobs": 2}, "prompt_logprobs"),
            ("completions", {"prompt": "abc", "n": 5, "prompt_logprobs": 0}, "prompt_logprobs"),
            ("completions", {"prompt": ["abcd", "abc"], "echo": True, "logprobs": 1}, "logprobs"),
            ("chat/completions", {"messages": CHAT, "prompt_logprobs": 0}, "prompt_logprobs"),
            ("score", {"prompt": "ab", "completion": "abcde", "top_logprobs": 2}, "completion"),
        ):
            answer = http.post(f"/v1/{route}", json={"model": MODEL, **body})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
            assert "may ask for 12" in answer.json()["error"]["message"]
        assert not running.engine.requests
        fits = {"model": MODEL, "prompt": "abcd", "prompt_logprobs": 2, "max_tokens": 1}
        assert http.post("/v1/completions", json=fits).status_code == 200


def test_the_end_token_is_not_text(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("")
    plain = client.completions.create(model=MODEL, prompt="ab", logprobs=1)
    assert plain.choices[0].logprobs.tokens == []
