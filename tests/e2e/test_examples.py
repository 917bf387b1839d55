"""What people have at hand, given to a whole Temper as it is: adapters of other trainers, and answers of the chat as
examples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import wait_for_end
from tests.e2e.test_cli import name, temper
from tests.stack import TINY, Stack

PROMPT = "Who are you? What is 12 plus 7?"
THINKING = {"enable_thinking": True}


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


def made(directory: Path, **fields: Any) -> PeftModel:
    """An adapter that PEFT makes and writes, with a B that is not zero."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **fields}))
    for key, parameter in peft.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.05)
    peft.save_pretrained(directory)
    return peft


def logprobs_of(peft: PeftModel, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        found = torch.log_softmax(peft(torch.tensor([tokens])).logits[0].double(), dim=-1)
    return [found[place, token].item() for place, token in enumerate(tokens[1:])]


def served(http: httpx.Client, adapter: str, tokens: list[int]) -> list[float]:
    body = {"model": "qwen3.5", "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "adapter": adapter}
    answer = http.post("/v1/completions", json=body).json()
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    return [entry[str(token)]["logprob"] for entry, token in zip(entries, tokens[1:], strict=True)]


@pytest.mark.parametrize(
    "fields",
    [
        {
            "target_modules": r"\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:attn|mlp).*?"
            r"\.(?:q_proj|up_proj|out_proj)",
            "exclude_modules": r".*\.layers\.(?!0|3)\d\.mlp\..*",
            "alpha_pattern": {r".*layers\.(?!3).*out_proj": 32},
        },
        {
            "target_modules": ["q_proj", "up_proj"],
            "alpha_pattern": {".*language_model.*": 64, "model.language_model.layers.3.self_attn.q_proj": 64},
            "rank_pattern": {r"model\.language_model\..*": 8},
        },
    ],
    ids=["lookaround", "of-the-other-class"],
)
def test_adapters_of_other_trainers_are_served_as_peft_computes_them(
    stack: Stack, http: httpx.Client, tmp_path: Path, fields: dict[str, Any]
) -> None:
    peft, adapter = made(tmp_path / "made", **fields), name()
    done = temper(stack, "adapters", "upload", str(tmp_path / "made"), "--name", adapter)
    assert done.returncode == 0, done.stderr
    asked = {"model": "qwen3.5", "messages": [{"role": "user", "content": PROMPT}]}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    expected, found, base = logprobs_of(peft, tokens), served(http, adapter, tokens), served(http, "base", tokens)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-3
    assert max(abs(a - b) for a, b in zip(base, expected, strict=True)) > 0.1

    # What a job that continues it publishes loads in PEFT and says the same: the rate is nothing.
    body = {"adapter": adapter, "attach": False, "examples": [{"text": "x y"}], "epochs": 1, "learning_rate": 1e-30}
    job = wait_for_end(http, http.post("/v1/train/sft", json=body).json()["id"])
    assert job["result_adapter"] == f"{adapter}@2", job
    again = served(http, f"{adapter}@2", tokens)
    assert max(abs(a - b) for a, b in zip(again, found, strict=True)) < 1e-4
    assert temper(stack, "adapters", "download", f"{adapter}@2", str(tmp_path / "two")).returncode == 0
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), tmp_path / "two"
    )
    assert max(abs(a - b) for a, b in zip(logprobs_of(loaded, tokens), expected, strict=True)) < 1e-3


def test_answers_of_the_chat_are_examples_as_they_came(stack: Stack, http: httpx.Client) -> None:
    """Over plain HTTP and as openai-python dumps them, with thinking and without, beside a greeting and weights."""
    question = {"role": "user", "content": "What is 12 plus 7?"}
    body = {"model": "qwen3.5", "messages": [question], "max_tokens": 40, "temperature": 0}
    plain = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    thought = http.post(
        "/v1/chat/completions", json=body | {"chat_template_kwargs": THINKING, "max_tokens": 200}
    ).json()
    thinking = thought["choices"][0]["message"]
    assert thinking["reasoning_content"]
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(**body).choices[0].message
    greeting = {"role": "assistant", "content": "Welcome!"}
    conversations: list[list[dict[str, Any]]] = [
        [question, plain],
        [question, answer.model_dump()],
        [question, answer.model_dump(exclude_none=True)],
        [greeting, question, plain],
        [{"role": "developer", "content": "Be brief."}, greeting, question, plain],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, plain | {"weight": 0}, question, plain],
    ]
    adapter = name()

    def trained(examples: list[list[dict[str, Any]]], **fields: Any) -> tuple[dict[str, Any], list[str]]:
        sent = {
            "adapter": adapter,
            "attach": False,
            "start_from": "base",
            "epochs": 1,
            "learning_rate": 1e-30,
            **fields,
        }
        answer = http.post("/v1/train/sft", json={**sent, "examples": [{"messages": one} for one in examples]})
        assert answer.status_code == 202, answer.text
        job = wait_for_end(http, answer.json()["id"])
        assert job["state"] == "succeeded", job["reason"]
        events = http.get(f"/v1/train/jobs/{job['id']}/events").text.splitlines()
        data = [json.loads(line.removeprefix("data: ")) for line in events if line.startswith("data: ")]
        return job, [str(event["data"]) for event in data if event["kind"] == "log"]

    alone, _ = trained([[question, plain]])
    for conversation in conversations[1:3]:
        found, _ = trained([conversation])
        assert math.isclose(found["metrics"]["loss"], alone["metrics"]["loss"], rel_tol=1e-6)
    trained(conversations)
    _, said = trained([[question, thinking], [question, plain]], chat_template_kwargs=THINKING)
    assert any("1 of the examples answer without reasoning although thinking is on (1)" in line for line in said), said


def test_what_a_default_temper_would_not_do_is_refused_at_submission(http: httpx.Client) -> None:
    """By what its engine announces: webhooks, and the layers of the model."""
    webhook = {"type": "webhook", "url": "http://169.254.169.254/latest"}
    generate = {"prompts": ["2+2"], "rounds": 1, "max_tokens": 4, "reward": webhook}
    answer = http.post("/v1/train/grpo", json={"adapter": name(), "generate": generate})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "generate.reward[0].url")
    assert "TEMPER_REWARD_WEBHOOKS" in answer.json()["error"]["message"]
    example = {"prompt": "a", "completion": "b"}
    for layer, status in (("layers.0.self_attn.q_proj", 400), ("layers.3.self_attn.q_proj", 202)):
        lora = {"rank": 2, "target_modules": [layer]}
        body = {"adapter": name(), "attach": False, "epochs": 1, "examples": [example], "lora": lora}
        answer = http.post("/v1/train/sft", json=body)
        assert answer.status_code == status, answer.text
    assert wait_for_end(http, answer.json()["id"])["state"] == "succeeded"
