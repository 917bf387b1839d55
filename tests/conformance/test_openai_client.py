"""What programs written for OpenAI's API expect, against the whole system, through the real openai client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.stack import Stack

USER = [{"role": "user", "content": "What is 12 plus 7?"}]
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: openai.OpenAI, stack: Stack) -> None:
    models = client.models.list().data
    assert models[0].id == stack.served_model_name
    assert client.models.retrieve(models[0].id).object == "model"


def test_stream_equals_plain(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "messages": USER, **GREEDY, "extra_body": {"return_token_ids": True}}
    plain = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == plain.choices[0].message.content
    assert [t for choice in choices for t in choice.model_extra["token_ids"]] == plain.choices[0].model_extra[
        "token_ids"
    ]
    assert choices[-1].finish_reason == plain.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert plain.usage.completion_tokens == len(plain.choices[0].model_extra["token_ids"])
    assert plain.usage.prompt_tokens == len(plain.model_extra["prompt_token_ids"])
    assert len(plain.choices[0].model_extra["sampling_logprobs"]) == plain.usage.completion_tokens
    assert plain.model_extra["adapter"] is None


def test_token_prompts_equal_text_prompts(client: openai.OpenAI, model: str) -> None:
    text = "The quick brown fox, naïve 🙂, jumps over"
    first = client.completions.create(model=model, prompt=text, **GREEDY, extra_body={"return_token_ids": True})
    tokens = first.model_extra["prompt_token_ids"]
    second = client.completions.create(model=model, prompt=tokens, **GREEDY)
    batch = client.completions.create(model=model, prompt=[text, "Hello", text], **GREEDY)
    assert first.choices[0].text == second.choices[0].text == batch.choices[0].text == batch.choices[2].text
    assert [choice.index for choice in batch.choices] == [0, 1, 2]


@pytest.mark.thorough
def test_seed_does_not_depend_on_company(stack: Stack, client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "prompt": "Once", "max_tokens": 16, "seed": 5, "temperature": 2.0}
    options["extra_body"] = {"ignore_eos": True}
    alone = client.completions.create(**options).choices[0].text

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as many:
            noise = [many.completions.create(model=model, prompt=f"{i} more", max_tokens=20) for i in range(6)]
            same = [many.completions.create(**options) for _ in range(3)]
            answers = await asyncio.gather(*noise, *same)
            return [answer.choices[0].text for answer in answers[6:]]

    assert asyncio.run(together()) == [alone] * 3
    several = client.completions.create(**options, n=3)
    assert several.choices[0].text == alone
    assert len({choice.text for choice in several.choices}) > 1


def test_stop_string(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "prompt": "Tell me:", "temperature": 0, "max_tokens": 32}
    whole = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    stopped = client.completions.create(**options, stop=[stop], extra_body={"ignore_eos": True})
    assert stopped.choices[0].text == whole[: whole.find(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    chunks = client.completions.create(**options, stop=[stop], stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.choices[0].text


def test_length_is_exact(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="a", max_tokens=13, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 13
    assert answer.choices[0].finish_reason == "length"


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=USER, **GREEDY, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace").strip() == (
        answer.choices[0].message.content.strip()
    )
    for entry in content:
        assert entry.logprob <= 0
        assert entry.token == entry.top_logprobs[0].token, "greedy takes the likeliest"
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    text = client.completions.create(model=model, prompt="Say", **GREEDY, logprobs=2).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert text.logprobs.text_offset[0] == 0


def test_logit_bias(client: openai.OpenAI, model: str) -> None:
    token = client.completions.create(
        model=model, prompt="zebra", max_tokens=1, extra_body={"return_token_ids": True}
    ).model_extra["prompt_token_ids"][0]
    answer = client.completions.create(
        model=model, prompt="a", max_tokens=4, logit_bias={str(token): 100}, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].model_extra["token_ids"] == [token] * 4


def test_tools_and_thinking_are_accepted(client: openai.OpenAI, model: str) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    answer = client.chat.completions.create(model=model, messages=USER, **GREEDY, tools=[tool])
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    thinking = client.chat.completions.create(
        model=model, messages=USER, **GREEDY, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    assert "</think>" not in (thinking.choices[0].message.content or "")


def test_errors_are_openai_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="a", max_tokens=10**7)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model=model, messages=USER, extra_body={"frobnicate": 1})
    assert unknown.value.param == "frobnicate"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=model, messages=USER, stream=True, extra_body={"adapter": "nobody@3"})


def test_scored_completion_ids_become_a_job(stack: Stack, client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=USER, n=4, max_tokens=8, temperature=1.0)
    ids = [choice.model_extra["completion_id"] for choice in answer.choices]
    body = {
        "adapter": "conformance",
        "attach": False,
        "rollouts": [{"completion_id": i, "reward": float(n)} for n, i in enumerate(ids)],
    }
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        headers = {"idempotency-key": f"conformance-{answer.id}"}
        job = http.post("/v1/train/grpo", json=body, headers=headers)
        assert job.status_code == 202, job.text
        assert http.post("/v1/train/grpo", json=body, headers=headers).json()["id"] == job.json()["id"]
        unknown = http.post("/v1/train/grpo", json=body | {"rollouts": [{"completion_id": "x", "reward": 1}]})
        assert unknown.status_code == 404
        assert "x" in unknown.json()["error"]["message"]
        job_id = job.json()["id"]
        with http.stream("GET", f"/v1/train/jobs/{job_id}/events") as events:
            states = [json.loads(line[6:])["data"].get("state") for line in events.iter_lines() if line[:6] == "data: "]
        assert states[-1] == "succeeded", http.get(f"/v1/train/jobs/{job_id}").text
        version = http.get(f"/v1/train/jobs/{job_id}").json()["result_adapter"]
        assert http.get("/v1/adapters/conformance").json()["version"] == version
        answer = client.chat.completions.create(model="conformance", messages=USER, **GREEDY)
        assert answer.model_extra["adapter"] == version
        assert http.delete("/v1/adapters/conformance").status_code == 200


def test_corrupt_upload_names_the_tensor(stack: Stack) -> None:
    header = json.dumps(
        {"base_model.model.nothing.lora_A.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}
    ).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(8)
    config = json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}).encode()
    files = {"adapter_model.safetensors": weights, "adapter_config.json": config}
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        answer = http.post("/v1/adapters", data={"name": "foreign"}, files=files)
        assert answer.status_code == 422, answer.text
        assert "nothing" in answer.json()["error"]["message"]
        assert http.get("/v1/adapters/foreign").status_code == 404
