"""How likely given texts are."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway.protocol.pooling import ScoreResponse
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import hangs
from tests.unit.gateway.reading_engine import logprob, rank, reads, top_ids


def score(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/score", json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    ScoreResponse.model_validate_json(answer.content, strict=True)  # what the description promises
    found: dict[str, Any] = answer.json()
    return found


def test_completions_of_one_prompt(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = reads()
    answer = score(http, prompt="say", completion=["abc", "z", "mn"], top_logprobs=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == list(b"say")
    assert answer["object"] == "list"
    for index, (entry, text) in enumerate(zip(answer["data"], (b"abc", b"z", b"mn"), strict=True)):
        expected = [logprob(token, 3 + place) for place, token in enumerate(text)]
        assert entry["index"] == index
        assert entry["token_logprobs"] == expected
        assert entry["logprob"] == sum(expected)
        assert entry["tokens"] == len(text)
        assert entry["ranks"] == list(map(rank, text))
        assert entry["top_token_ids"] == [top_ids(token, 2) for token in text]
        assert [len(values) for values in entry["top_logprobs"]] == [2] * len(text)
        assert entry["token_ids"] == list(text)
    assert [entry["is_greedy"] for entry in answer["data"]] == [True, False, False]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == 3 * 3 + 6
    asked = {bytes(request.prompt_token_ids): request for request in running.engine.requests}
    assert {request.prompt_logprobs_from for request in asked.values()} == {3}, "the prompt may come from the cache"
    assert set(asked) == {b"sayabc", b"sayz", b"saymn"}


def test_token_ids_equal_text(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = reads()
    by_text = score(http, prompt="say", completion="abc")
    by_tokens = score(http, prompt=list(b"say"), completion=list(b"abc"))
    assert by_text["data"] == by_tokens["data"]
    assert "top_token_ids" not in by_text["data"][0]
    assert "token_ids" not in by_text["data"][0]


def test_a_conversation(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = reads()
    messages = [{"role": "user", "content": "Hi"}]
    options = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True}
    answer = score(http, **options, completion="a<think>b<|im_end|>")
    text = running.engine.codec.render_chat(messages, enable_thinking=True)
    assert answer["prompt_token_ids"] == running.engine.codec.encode(text)
    tokens = answer["data"][0]["token_ids"]
    # What a model may write itself is markup; an end of its turn is not for a text to make.
    assert tokens == running.engine.codec.encode_completion("a<think>b<|im_end|>")
    assert running.engine.codec.token_id("<think>") in tokens
    assert running.engine.codec.token_id("<|im_end|>") not in tokens
    end = [running.engine.codec.token_id("<|im_end|>")]
    assert score(http, messages=messages, completion=[*list(b"ok"), *end])["data"][0]["tokens"] == 3


def test_a_whole_text(running: Running, http: httpx.Client) -> None:
    """With nothing before it, its first token has no log-probability."""
    running.engine.behaviour = reads()
    for body in ({}, {"prompt": ""}, {"prompt": None}):
        (entry,) = score(http, **body, completion="abc", top_logprobs=1)["data"]
        assert entry["token_logprobs"] == [None, logprob(98, 1), logprob(99, 2)]
        assert entry["ranks"] == [None, 1, 1]
        assert entry["top_token_ids"] == [[], [98], [99]]
        assert entry["logprob"] == logprob(98, 1) + logprob(99, 2)
        assert (entry["tokens"], entry["is_greedy"]) == (3, True)


def test_the_policy_that_reads(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = reads()
    answer = http.post("/v1/score", json={"model": MODEL, "adapter": "b@7", "prompt": "a", "completion": "b"})
    assert answer.json()["adapter"] == answer.json()["data"][0]["adapter"] == "b@7"
    assert answer.headers["x-temper-adapter"] == "b@7"


def test_a_client_that_leaves(running: Running) -> None:
    running.engine.behaviour = hangs
    body = {"model": MODEL, "prompt": "a", "completion": ["b", "c"]}
    running.leave("/v1/score", body, lambda: len(running.engine.running) == 2)
    running.wait_for(lambda: len(running.engine.aborts) == 2)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"completion": None}, "completion"),
        ({"completion": ""}, "completion"),
        ({"completion": ["a", ""]}, "completion.1"),
        ({"completion": [[], [1]]}, "completion[0]"),
        ({"completion": [999]}, "completion"),
        ({"completion": "x" * 600}, "completion"),
        ({"completion": "a", "prompt": None}, "prompt"),
        ({"prompt": [1, 5000]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "prompt"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"tools": []}, "tools"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        (
            {"prompt": None, "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs.tools",
        ),
        ({"top_logprobs": 129}, "top_logprobs"),
        ({"top_logprobs": True}, "top_logprobs"),
        ({"model": "x y"}, "model"),
        ({"stream": True}, "stream"),
    ],
)
def test_bad_input(running: Running, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    running.engine.behaviour = reads()
    answer = http.post("/v1/score", json={"model": MODEL, "prompt": "a", "completion": "b"} | change)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert not running.engine.requests
