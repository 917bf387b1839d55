"""What TRL 1.16 asks a vLLM server for rollouts and a teacher's log-probabilities, and what it reads of the answers
(trl/generation/vllm_client.py, trl/experimental/async_grpo). Its adapters: test_dynamic_adapters."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.stack import PATIENCE, Stack

PROMPTS = [[20, 21, 22, 23], [30, 31, 32]]
SAMPLING: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 5,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as client:
        yield client


def numbers(named: str) -> int:
    """Id of a token as it is named."""
    kind, number = named.split(":")
    assert kind == "token_id"
    return int(number)


@pytest.mark.parametrize("alternatives", [0, 3])
def test_rollouts_of_token_ids(http: httpx.Client, stack: Stack, alternatives: int) -> None:
    body = {"model": stack.served_model_name, "prompt": PROMPTS, "n": 2, "logprobs": alternatives, **SAMPLING}
    ends: set[str] = set()
    for seed in range(50):  # until one has ended by itself, whose last token has an entry, too
        choices = http.post("/v1/completions", json={**body, "seed": seed}).raise_for_status().json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices[::2]] == PROMPTS
        for choice in choices:
            told = choice["logprobs"]
            assert [numbers(token) for token in told["tokens"]] == choice["token_ids"]
            ends.add(choice["finish_reason"])
            for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
                assert top[token] == logprob
                assert max(1, alternatives) <= len(top) <= alternatives + 1
                assert all(numbers(other) >= 0 for other in top)
        if "stop" in ends:
            break
    assert "stop" in ends


def test_a_pattern(http: httpx.Client, stack: Stack) -> None:
    body = {"model": stack.served_model_name, "prompt": PROMPTS, "n": 1, "logprobs": 0, **SAMPLING}
    body["structured_outputs"] = {"regex": "[0-9]+"}
    choices = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    assert all(len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) for choice in choices)
    assert all(choice["text"].isdigit() for choice in choices)


def test_chats(http: httpx.Client, stack: Stack) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    body = {"model": stack.served_model_name, "messages": messages, "n": 2, "logprobs": True, "top_logprobs": 2}
    body |= {**SAMPLING, "tools": tools, "tool_choice": "none"}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert len(answer["prompt_token_ids"]) > 10
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert [numbers(entry["token"]) for entry in content] == choice["token_ids"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_log_probabilities_of_sequences(http: httpx.Client, stack: Stack) -> None:
    sequences = [[20, 21, 22, 23, 24], [30, 31, 32, 33]]
    body = {"model": stack.served_model_name, "prompt": sequences, "max_tokens": 1, "temperature": 1.0}
    choices = http.post("/v1/completions", json={**body, "prompt_logprobs": 4}).raise_for_status().json()["choices"]
    for choice, sequence in zip(choices, sequences, strict=True):
        places = choice["prompt_logprobs"]
        assert len(places) == len(sequence)
        for token, place in zip(sequence[1:], places[1:], strict=True):
            assert {entry["rank"] for entry in place.values()} >= {1, 2, 3, 4}
            assert place[str(token)]["logprob"] < 0


def test_rollouts_of_async_grpo(http: httpx.Client, stack: Stack) -> None:
    """Its worker takes the log-probabilities to be those of all token ids."""
    body = {"model": stack.served_model_name, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 1.0, "n": 1}
    body |= {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "return_token_ids": True, "logprobs": 0}
    for seed in range(8):
        answer = http.post("/v1/completions", json={**body, "seed": seed}).raise_for_status().json()
        choice = answer["choices"][0]
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]), choice


def test_what_its_trainers_read_of_the_server(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    found = http.get("/server_info", params={"config_format": "json"}).raise_for_status().json()["vllm_config"]
    assert found["model_config"]["dtype"] == "torch.float32"
    assert found["lora_config"]["max_lora_rank"] >= 8
    assert found["lora_config"]["max_loras"] >= 2
    assert found["parallel_config"]["data_parallel_size"] == 1
    assert http.get("/get_world_size").json() == {"world_size": 1}


def test_a_pause_around_new_weights(http: httpx.Client, stack: Stack) -> None:
    body = {"model": stack.served_model_name, "prompt": PROMPTS[0], "max_tokens": 4, "ignore_eos": True}
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    with ThreadPoolExecutor(1) as threads:
        try:
            waiting = threads.submit(http.post, "/v1/completions", json=body)
            with pytest.raises(TimeoutError):
                waiting.result(0.5)
            assert http.get("/is_paused").json() == {"is_paused": True}
        finally:
            assert http.post("/resume").status_code == 200
        assert waiting.result(PATIENCE).json()["usage"]["completion_tokens"] == 4
