"""vLLM's dynamic adapters against the whole system, by the calls that AIBrix, production-stack's operator and TRL's
asynchronous GRPO make, with what each of them reads of the answers."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack import PATIENCE, Stack


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def saved(stack: Stack, http: httpx.Client) -> Path:
    """Directory in which a trainer has saved an adapter of PEFT's."""
    root = Path(stack.env["TEMPER_ADAPTERS_DIR"])
    if not (root / "policy").exists():
        examples = [{"prompt": "Say the word.", "completion": "7"}]
        body = {"adapter": "for-dynamic", "attach": False, "examples": examples, "epochs": 1, "lora": {"rank": 4}}
        job = http.post("/v1/train/sft", json=body).raise_for_status().json()["id"]
        deadline = time.monotonic() + PATIENCE
        while http.get(f"/v1/train/jobs/{job}").json()["state"] != "succeeded":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        packed = http.get("/v1/adapters/for-dynamic/download").raise_for_status().content
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(root, filter="data")
        (root / "for-dynamic-1").rename(root / "policy")
        http.delete("/v1/adapters/for-dynamic").raise_for_status()
    return root / "policy"


def chat(http: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Say the word."}], "max_tokens": 4}
    return http.post("/v1/chat/completions", json=body)


def test_trl_async_grpo(http: httpx.Client, saved: Path, stack: Stack) -> None:
    """Each policy has a name of its own; the one before is unloaded, and so is what was never loaded."""
    assert http.get("/health").status_code == 200
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] > 0
    for version in (1, 2):
        name = f"policy-{version}"
        body = {"lora_name": name, "lora_path": str(saved), "load_inplace": False}
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        http.post("/v1/unload_lora_adapter", json={"lora_name": f"policy-{version - 1}"})
        assert chat(http, name).json()["model"] == name
    assert chat(http, "policy-1").status_code == 404
    http.post("/v1/unload_lora_adapter", json={"lora_name": "policy-2"})


def test_aibrix(http: httpx.Client, saved: Path) -> None:
    """The controller looks for the name among the models of each pod before it loads it there."""

    def reconcile() -> bool:
        models = {model["id"] for model in http.get("/v1/models").raise_for_status().json()["data"]}
        if "aibrix-lora" in models:
            return False
        body = {"lora_name": "aibrix-lora", "lora_path": str(saved)}
        assert http.post("/v1/load_lora_adapter", json=body).status_code in (200, 201)
        return True

    assert [reconcile(), reconcile()] == [True, False]
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "aibrix-lora"}).status_code == 200


def test_production_stack_operator(http: httpx.Client, saved: Path, stack: Stack) -> None:
    """The operator loads a name on every pod; one that has it already answers 400, which it takes for a success by its
    outermost type and message. What is loaded has a parent in the list of models."""

    def send(path: str, payload: dict[str, Any]) -> None:
        answer = http.post(path, json=payload)
        if answer.status_code == 400:
            body = answer.json()
            assert body.get("type") == "InvalidUserInput"
            assert "has already been loaded" in body.get("message", "")
            return
        assert answer.status_code == 200, answer.text

    for _ in range(2):  # two pods, which share the object store
        send("/v1/load_lora_adapter", {"lora_name": "operator-lora", "lora_path": str(saved)})
    registered = {
        model["id"]: (model["root"], model["created"] > 0)
        for model in http.get("/v1/models").json()["data"]
        if model["parent"] is not None
    }
    assert registered["operator-lora"] == ("operator-lora@1", True)
    send("/v1/unload_lora_adapter", {"lora_name": "operator-lora"})


def test_s3_outside_of_what_is_allowed(http: httpx.Client) -> None:
    body = {"lora_name": "stolen", "lora_path": "s3://temper/adapters/x"}
    answer = http.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidUserInput")
