"""Log-probabilities and vectors of texts, against the whole system, beside transformers with the same checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from tests.stack import TINY, Stack

CONTEXT, TEXT = "Question: What is 12 plus 7?\nAnswer:", " 19, naïve 🙂 as it is."
BAR = 1e-4


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference() -> Qwen3_5ForCausalLM:
    torch.set_num_threads(1)
    return Qwen3_5ForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@torch.no_grad()
def reference_logprobs(reference: Qwen3_5ForCausalLM, tokens: list[int]) -> list[float]:
    """Of all tokens but the first."""
    logprobs = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].double(), -1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).tolist()


def test_scores_are_those_of_transformers(
    stack: Stack, http: httpx.Client, reference: Qwen3_5ForCausalLM, tokenizer: Any
) -> None:
    prompt, text = (tokenizer(part, add_special_tokens=False).input_ids for part in (CONTEXT, TEXT))
    body = {"model": stack.served_model_name, "prompt": CONTEXT, "completion": [TEXT, " 19"], "top_logprobs": 4}
    answer = http.post("/v1/score", json=body | {"return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == prompt
    whole, _ = answer["data"]
    (same,) = http.post(
        "/v1/score", json=body | {"prompt": prompt, "completion": [text], "return_token_ids": True}
    ).json()["data"]
    assert whole["token_ids"] == same["token_ids"] == text
    expected = reference_logprobs(reference, prompt + text)[len(prompt) - 1 :]
    for entry in (whole, same):
        assert entry["token_logprobs"] == pytest.approx(expected, abs=BAR)
        assert entry["logprob"] == pytest.approx(sum(expected), abs=BAR * len(text))
        for token, logprob, rank, ids, values in zip(
            text, entry["token_logprobs"], entry["ranks"], entry["top_token_ids"], entry["top_logprobs"], strict=True
        ):
            assert len(ids) == 4
            assert values == sorted(values, reverse=True)
            if rank <= 4:
                assert ids[rank - 1] == token
                assert values[rank - 1] == logprob
    # A long text, in several chunks of the engine.
    long = (prompt + text) * 40
    body = {"model": stack.served_model_name, "completion": long}
    (entry,) = http.post("/v1/score", json=body).json()["data"]
    assert len(long) > 600
    assert entry["token_logprobs"][0] is None
    assert entry["token_logprobs"][1:] == pytest.approx(reference_logprobs(reference, long), abs=BAR)


@pytest.mark.thorough
def test_echo_says_what_score_says(stack: Stack, http: httpx.Client, client: openai.OpenAI, tokenizer: Any) -> None:
    """As lm-eval asks for likelihoods: tokens of context and continuation, one token more, and that one cut off."""
    model = stack.served_model_name
    context, text = (tokenizer(part, add_special_tokens=False).input_ids for part in (CONTEXT, TEXT))
    scored = http.post("/v1/score", json={"model": model, "prompt": context, "completion": text}).json()["data"][0]
    options: dict[str, Any] = {"model": model, "prompt": [context + text], "temperature": 0, "logprobs": 1, "seed": 1}
    answer = client.completions.create(**options, max_tokens=1, echo=True)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(context) + len(text) + 1
    continuation = told.token_logprobs[len(context) : -1]
    assert continuation == pytest.approx(scored["token_logprobs"], abs=1e-5)
    greedy = all(
        own == max(top.values()) for own, top in zip(continuation, told.top_logprobs[len(context) : -1], strict=True)
    )
    assert greedy == scored["is_greedy"]
    joined = CONTEXT + TEXT
    assert answer.choices[0].text.startswith(joined)
    assert told.text_offset[len(context)] == len(CONTEXT)
    only = client.completions.create(**options, max_tokens=0, echo=True).choices[0]
    assert only.text == joined
    assert only.logprobs.token_logprobs == pytest.approx(told.token_logprobs[:-1], abs=1e-5)
    # Greedy text is greedy.
    said = (
        client.completions.create(
            model=model, prompt=context, temperature=0, max_tokens=12, extra_body={"return_token_ids": True}
        )
        .choices[0]
        .model_extra["token_ids"]
    )
    entry = http.post("/v1/score", json={"model": model, "prompt": context, "completion": said}).json()["data"][0]
    assert entry["is_greedy"]
    listed = client.completions.create(
        model=model, prompt=context + text, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    by_token = listed.choices[0].model_extra["prompt_logprobs"]
    assert [entry[str(token)]["logprob"] for token, entry in zip(text, by_token[len(context) :], strict=True)] == (
        pytest.approx(scored["token_logprobs"], abs=1e-5)
    )


def test_a_chat_is_scored_as_it_is_answered(stack: Stack, http: httpx.Client, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is 12 plus 7?"}]
    answer = client.chat.completions.create(
        model=stack.served_model_name,
        messages=messages,
        temperature=0,
        max_tokens=20,
        logprobs=True,
        extra_body={"return_token_ids": True, "prompt_logprobs": 1},
    )
    choice = answer.choices[0]
    body = {"model": stack.served_model_name, "messages": messages, "completion": choice.model_extra["token_ids"]}
    scored = http.post("/v1/score", json=body | {"return_token_ids": True}).json()
    assert scored["prompt_token_ids"] == answer.model_extra["prompt_token_ids"]
    assert scored["data"][0]["is_greedy"]
    sampled = choice.model_extra["sampling_logprobs"]
    assert scored["data"][0]["token_logprobs"] == pytest.approx(sampled, abs=BAR)
    assert len(answer.model_extra["prompt_logprobs"]) == answer.usage.prompt_tokens


def test_embeddings_are_hidden_states(
    stack: Stack, client: openai.OpenAI, reference: Qwen3_5ForCausalLM, tokenizer: Any
) -> None:
    texts = [CONTEXT, "Hello", TEXT * 30]
    for pooling in ("last", "mean"):
        answer = client.embeddings.create(
            model=stack.served_model_name, input=texts, extra_body={"pooling": pooling, "normalize": False}
        )
        for entry, text in zip(answer.data, texts, strict=True):
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            with torch.no_grad():
                hidden = reference.model(ids).last_hidden_state[0]
            expected = hidden[-1] if pooling == "last" else hidden.mean(0)
            assert entry.embedding == pytest.approx(expected.tolist(), abs=BAR)
    floats = client.embeddings.create(model=stack.served_model_name, input=texts, encoding_format="float")
    packed = client.embeddings.create(model=stack.served_model_name, input=texts, encoding_format="base64")
    default = client.embeddings.create(model=stack.served_model_name, input=texts)
    assert isinstance(packed.data[0].embedding, str)
    for one, other in zip(floats.data, default.data, strict=True):
        assert math.hypot(*one.embedding) == pytest.approx(1.0, abs=1e-5)
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert answer.usage.prompt_tokens == sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids)
