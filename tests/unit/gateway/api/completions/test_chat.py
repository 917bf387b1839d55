"""Chat completions through the real openai client."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from services.common.pb import engine_pb2
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import says

USER = [{"role": "user", "content": "hi"}]


def test_plain_answer(running: Running, client: openai.OpenAI) -> None:
    running.engine.attached = "bot@3"
    running.engine.cached_tokens = 5
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=USER)
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["completion_id"] == answer.id
    assert answer.model_extra["adapter"] == "bot@3"
    assert raw.headers["x-temper-adapter"] == "bot@3"
    assert raw.headers["x-request-id"]
    assert answer.usage.completion_tokens == 13
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    request = running.engine.requests[0]
    assert request.request_id == answer.id
    assert request.keep_rollout
    assert request.sampling.temperature == 1.0
    prompt = running.engine.codec.encode_chat(USER)
    assert list(request.prompt_token_ids) == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert request.sampling.max_tokens == 512 - len(prompt), "as much as fits, not 16"


def test_base_has_no_adapter(running: Running, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=USER, extra_body={"adapter": "base"})
    assert raw.parse().model_extra["adapter"] is None
    assert "x-temper-adapter" not in raw.headers
    assert running.engine.requests[0].adapter.base


def test_stream_equals_plain(running: Running, client: openai.OpenAI) -> None:
    text = "naïve 🙂 日本語 — done"
    running.engine.behaviour = says(text)
    running.engine.attached = "bot@1"
    plain = client.chat.completions.create(model=MODEL, messages=USER)
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(raw.parse())
    assert raw.headers["x-temper-adapter"] == "bot@1"
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == plain.choices[0].message.content == text
    assert all("\ufffd" not in delta for delta in deltas)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage
    assert all(chunk.model_extra["adapter"] == "bot@1" for chunk in chunks)
    assert all(c.choices[0].model_extra["completion_id"] == c.id for c in chunks if c.choices)


def test_stream_ends_with_done(running: Running, http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": USER, "stream": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


@pytest.mark.parametrize("stream", [False, True])
def test_choices(running: Running, client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, n=3, seed=-1, stream=stream)
    if stream:
        texts = ["", "", ""]
        ids = {}
        for chunk in answer:
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] = choice.model_extra["completion_id"]
            response_id = chunk.id
    else:
        texts = [choice.message.content for choice in answer.choices]
        ids = {choice.index: choice.model_extra["completion_id"] for choice in answer.choices}
        response_id = answer.id
    assert texts == ["Hello, world"] * 3
    assert ids == {i: f"{response_id}:{i}" for i in range(3)}
    assert sorted(r.sampling.seed for r in running.engine.requests) == [0, 1, 2**64 - 1]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_over_token_boundaries(running: Running, client: openai.OpenAI, stream: bool) -> None:
    running.engine.behaviour = says("one two END three four", pause=0.01)
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, stop=["END", "zzz"], stream=stream, extra_body={"return_token_ids": True}
    )
    if stream:
        chunks = list(answer)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
        tokens = [t for c in chunks for t in c.choices[0].model_extra["token_ids"]]
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        tokens = answer.choices[0].model_extra["token_ids"]
    assert text == "one two "
    assert reason == "stop"
    assert tokens == running.engine.codec.encode("one two END")
    running.wait_for(lambda: bool(running.engine.aborts))
    assert running.engine.aborts[0][1] == len(tokens), "the engine keeps the rollout up to here"


def test_return_token_ids(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("ab")
    answer = client.chat.completions.create(model=MODEL, messages=USER, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert choice.model_extra["token_ids"] == [97, 98, 258]
    assert choice.model_extra["sampling_logprobs"] == [-0.25] * 3
    assert answer.model_extra["prompt_token_ids"] == running.engine.codec.encode_chat(USER)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(running: Running, client: openai.OpenAI, stream: bool) -> None:
    running.engine.behaviour = says("né!")
    answer = client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        entries = [e for c in answer if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "né!"
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 4
    assert entries[0].logprob == -0.5
    assert running.engine.requests[-1].sampling.top_logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(running: Running, client: openai.OpenAI, stream: bool) -> None:
    running.engine.behaviour = says("let me see\n</think>\n\nforty two")
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, stream=stream, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas)
    else:
        content = answer.choices[0].message.content
        reasoning = answer.choices[0].message.model_extra["reasoning_content"]
        assert answer.usage.completion_tokens_details.reasoning_tokens > 5
    assert content == "forty two"
    assert reasoning == "let me see"


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = (
    "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(running: Running, client: openai.OpenAI, stream: bool) -> None:
    running.engine.behaviour = says(CALL)
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER], stream=stream)
    if stream:
        content, arguments, name, call_id, reason = "", "", None, None, None
        for chunk in answer:
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for call in delta.tool_calls or []:
                name, call_id = call.function.name or name, call.id or call_id
                arguments += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        call = message.tool_calls[0]
        content, arguments, name, call_id = message.content, call.function.arguments, call.function.name, call.id
    assert content == "Sure."
    assert name == "weather"
    assert call_id.startswith("call_")
    assert json.loads(arguments) == {"city": "Paris", "days": 3}
    assert reason == "tool_calls"
    prompt = running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids))
    assert '"name": "weather"' in prompt


def test_tool_choice_none_hides_the_tools(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says(CALL)
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"


def test_parallel_tool_calls_off_ends_with_the_first(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says(CALL + "\n" + CALL.removeprefix("Sure.\n\n"), pause=0.001)
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


def test_answers_go_back_into_the_conversation(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says(CALL)
    first = client.chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER]).choices[0].message
    running.engine.behaviour = says("sunny")
    messages = [*USER, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sun"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "sunny"
    prompt = running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids))
    assert '<tool_call>{"city": "Paris", "days": 3}</tool_call>' in prompt


def test_sampling_fields_reach_the_engine(running: Running, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        temperature=0.5,
        top_p=0.9,
        max_completion_tokens=7,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"97": -5},
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [5, 256],
            "cache_salt": "s",
            "priority": -1,
            "adapter": "bot@2",
        },
    )
    request = running.engine.requests[0]
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (40, 2, 7, True)
    assert dict(sampling.logit_bias) == {97: -5.0}
    assert list(sampling.stop_token_ids) == [256], "what clients see of text, only the gateway knows"
    assert not sampling.HasField("seed")
    assert not sampling.HasField("top_logprobs")
    assert sampling.temperature == pytest.approx(0.5)
    assert sampling.repetition_penalty == pytest.approx(1.1)
    assert (request.cache_salt, request.priority) == ("client:s", -1)
    assert request.adapter.named == engine_pb2.NamedAdapter(name="bot", version=2)
    assert request.deadline_unix_ms > 0


def test_long_prompts_are_tokenized_in_a_thread(start: Starter) -> None:
    running = start(offload_chars=0)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(model=MODEL, messages=USER).choices[0].message.content == "Hello, world"
        assert client.completions.create(model=MODEL, prompt="ab").usage.prompt_tokens == 2
    assert list(running.engine.requests[0].prompt_token_ids) == running.engine.codec.encode_chat(USER)


def test_adapter_by_model_name(running: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="bot@4", messages=USER)
    assert answer.model_extra["adapter"] == "bot@4"
