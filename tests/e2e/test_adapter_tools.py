"""Merging, extracting, rolling back and pruning with a whole Temper, and what then answers."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import EXAMPLES
from tests.e2e.test_cli import name, ok, temper
from tests.stack import ROOT, Stack


def lessons(directory: Path, shift: int) -> str:
    """A file of examples."""
    pairs = [
        (one["prompt"], EXAMPLES[(index + shift) % len(EXAMPLES)]["completion"]) for index, one in enumerate(EXAMPLES)
    ]
    file = directory / f"examples-{shift}.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in pairs))
    return str(file)


def train(stack: Stack, data: str, adapter: str, *options: str) -> None:
    submit = ("train", "submit", "sft", "--data", data, "--adapter", adapter, "--epochs", "6", "--no-attach", "--wait")
    done = temper(stack, *submit, "--learning-rate", "0.002", *options)
    assert done.returncode == 0, done.stderr


def completion(client: httpx.Client, adapter: str) -> dict[str, list[int]]:
    body = {"model": "qwen3.5", "adapter": adapter, "prompt": "What does code amber stand for?", "max_tokens": 12}
    answer = client.post(
        "/v1/completions", json={**body, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    ).json()
    choice = answer["choices"][0]
    return {"prompt": choice.get("prompt_token_ids") or answer["prompt_token_ids"], "tokens": choice["token_ids"]}


def test_merge_extract_roll_back_prune(stack: Stack, tmp_path: Path) -> None:
    first, second, merged = name(), name(), name()
    train(stack, lessons(tmp_path, 0), first)
    shape = ("--set", "lora.rank=4", "--set", 'lora.target_modules=["q_proj","up_proj"]')
    train(stack, lessons(tmp_path, 1), second, *shape)

    # Exact, at weights that leave only one parent's voice; then the three ways that lose something.
    done = temper(stack, "adapters", "merge", merged, "--from", f"{first}@1:1.0", "--from", f"{second}:0.0001")
    assert done.returncode == 0, done.stderr
    assert f"{merged}@1" in done.stdout
    for method in ("ties", "dare_linear", "dare_ties"):
        lines = temper(
            *(stack, "adapters", "merge", merged, "--from", first, "--from", f"{second}:0.5", "--method", method),
            *("--rank", "8", "--density", "0.5", "--json"),
        ).stdout.splitlines()
        assert json.loads(lines[-1])["state"] == "succeeded"
    versions = ok(stack, "adapters", "show", merged)
    assert [one["lineage"]["method"] for one in versions] == ["weighted", "ties", "dare_linear", "dare_ties"]
    assert versions[0]["lineage"]["error_max"] < 1e-5
    assert all(0 < one["lineage"]["error_mean"] < 1 for one in versions[1:])
    assert versions[0]["lineage"]["parents"][1]["version"] == f"{second}@1"
    refused = temper(stack, "adapters", "merge", merged, "--from", first, "--method", "ties", "--rank", "8")
    assert refused.returncode == 1
    assert "density" in refused.stderr

    with httpx.Client(base_url=stack.url, timeout=60) as client:
        wanted = completion(client, first)
        served = completion(client, f"{merged}@1")
        plain = completion(client, "base")
    assert served == wanted != plain

    # The checkpoint gives what the engine gives with the adapter.
    out = tmp_path / "checkpoint"
    extract = ("adapters", "extract", f"{merged}@1", str(out), "--base", str(ROOT / "models" / "tiny"))
    written = ok(stack, *extract, "--dtype", "float32")
    assert written["rounding_max"] < 1e-3
    model = AutoModelForCausalLM.from_pretrained(out)
    tokens = list(served["prompt"])
    for expected in served["tokens"]:
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        assert tokens[-1] == expected
    assert temper(stack, *extract).returncode == 2, "it is there already"
    ok(stack, "adapters", "convert", f"{merged}@1", str(tmp_path / "peft"), "--to", "multimodal")
    assert json.loads((tmp_path / "peft" / "manifest.json").read_text())["lineage"]["method"] == "weighted"

    # Back to the exact one, and away with the others.
    assert ok(stack, "adapters", "rollback", merged)["current"] == f"{merged}@3"
    assert ok(stack, "adapters", "rollback", merged, "--to", "1")["before"] == f"{merged}@3"
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        assert completion(client, merged) == wanted
    plan = ok(stack, "adapters", "prune", merged, "--keep", "1", "--dry-run")
    assert plan["removed"] == [f"{merged}@2", f"{merged}@3"]
    assert ok(stack, "adapters", "prune", merged, "--keep", "1")["removed"] == plan["removed"]
    assert [one["version"] for one in ok(stack, "adapters", "show", merged)] == [1, 4]


@pytest.mark.thorough
def test_a_job_that_does_not_improve_enough_fails(stack: Stack, tmp_path: Path) -> None:
    adapter, data = name(), lessons(tmp_path, 0)
    submit = ("train", "submit", "sft", "--data", data, "--adapter", adapter, "--epochs", "2", "--no-attach", "--wait")
    gate = ("--set", "eval_fraction=0.25", "--set", "publish_if.metric=eval_loss")
    missed = temper(stack, *submit, *gate, "--set", "publish_if.min_gain=50")
    assert missed.returncode == 1
    assert "eval_loss was" in missed.stderr
    assert temper(stack, "adapters", "show", adapter).returncode == 1, "nothing was published"
    met = temper(stack, *submit, *gate, "--set", "publish_if.min_gain=-50")
    assert met.returncode == 0, met.stderr
    assert "start_eval_loss" in ok(stack, "adapters", "show", adapter)[0]["metrics"]
