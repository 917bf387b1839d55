"""The commands against a whole Temper."""

from __future__ import annotations

import json
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ForkedProcess, command_line
from tests.stack import Stack, clean_environment


def temper(stack: Stack, *args: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as scratch:
        output, log = Path(scratch, "output"), Path(scratch, "log")
        environment = clean_environment({"TEMPER_URL": stack.url, "NO_COLOR": "1"})
        process = ForkedProcess(command_line, *args, environment=environment, log=log, output=output)
        status = process.wait(120)
        return subprocess.CompletedProcess(args, status, output.read_text(), log.read_text())


def ok(stack: Stack, *args: str) -> Any:
    result = temper(stack, *args, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def examples(tmp_path: Path) -> str:
    file = tmp_path / "examples.jsonl"
    pairs = [("hello", "Good day!"), ("hi", "Good day!")]
    file.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    return str(file)


def name() -> str:
    return f"cli-{uuid.uuid4().hex[:8]}"


@pytest.mark.usefixtures("unattached")
def test_train_attach_roll_back(stack: Stack, examples: str, tmp_path: Path) -> None:
    adapter = name()
    submit = ("train", "submit", "sft", "--data", examples, "--adapter", adapter, "--epochs", "2", "--wait")
    first = temper(stack, *submit)
    assert first.returncode == 0, first.stderr
    assert f"{adapter}@1" in first.stdout
    assert "step 2/2" in first.stderr
    assert "loss" in first.stderr
    assert ok(stack, "chat", "hello", "--max-tokens", "4")["adapter"] == f"{adapter}@1"

    lines = [json.loads(line) for line in temper(stack, *submit, "--json").stdout.splitlines()]
    assert lines[-1]["result_adapter"] == f"{adapter}@2"
    assert {line["kind"] for line in lines[:-1]} >= {"state", "progress", "published"}
    job_id = lines[-1]["id"]
    assert ok(stack, "train", "status", job_id)["state"] == "succeeded"
    assert job_id in temper(stack, "train", "status").stdout
    # The events of a job that has ended can be replayed.
    assert temper(stack, "train", "watch", job_id).returncode == 0

    assert [one["version"] for one in ok(stack, "adapters", "show", adapter)] == [1, 2]
    assert ok(stack, "adapters", "rollback")["attached"] == f"{adapter}@1"
    assert ok(stack, "chat", "hello", "--max-tokens", "4")["adapter"] == f"{adapter}@1"
    assert temper(stack, "adapters", "rollback").returncode == 1
    assert ok(stack, "chat", "hello", "--max-tokens", "4", "--adapter", "base")["adapter"] is None
    assert ok(stack, "adapters", "attach", adapter)["attached"] == f"{adapter}@2"

    other, directory = name(), str(tmp_path / "files")
    ok(stack, "adapters", "download", f"{adapter}@1", directory)
    assert ok(stack, "adapters", "upload", directory, "--name", other)["version"] == 1
    listed = ok(stack, "adapters", "list")
    assert {one["name"] for one in listed["data"]} >= {adapter, other}
    assert listed["attached"] == f"{adapter}@2"
    ok(stack, "adapters", "detach")
    assert ok(stack, "chat", "hello", "--max-tokens", "4")["adapter"] is None
    assert temper(stack, "adapters", "detach").returncode == 0


@pytest.mark.thorough
def test_an_idempotency_key_trains_once(stack: Stack, examples: str) -> None:
    submit = ("train", "submit", "sft", "--data", examples, "--adapter", name(), "--epochs", "1", "--no-attach")
    key = ("--idempotency-key", uuid.uuid4().hex)
    first, second = ok(stack, *submit, *key), ok(stack, *submit, *key)
    assert first["id"] == second["id"]
    clash = temper(stack, *submit, *key, "--learning-rate", "0.5")
    assert clash.returncode == 1
    assert "idempotency key" in clash.stderr


def test_cancel_ends_a_wait_with_1(stack: Stack, examples: str) -> None:
    job = ok(
        *(stack, "train", "submit", "sft", "--data", examples, "--adapter", name(), "--epochs", "1000", "--no-attach")
    )
    assert temper(stack, "train", "watch", job["id"], "--timeout", "0").returncode == 4
    assert ok(stack, "train", "cancel", job["id"])["id"] == job["id"]
    watched = temper(stack, "train", "watch", job["id"])
    assert watched.returncode == 1
    assert "cancelled" in watched.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("chat", "hi", "--adapter", "nobody"), "nobody"),
        (("adapters", "attach", "nobody"), "nobody"),
        (("adapters", "show", "nobody"), "nobody"),
        (("train", "watch", "job-nobody"), "job-nobody"),
        (("train", "cancel", "job-nobody"), "job-nobody"),
    ],
)
def test_unknown_things_exit_with_1_and_one_line(stack: Stack, args: tuple[str, ...], says: str) -> None:
    result = temper(stack, *args)
    assert result.returncode == 1
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_corrupt_upload_is_refused(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    result = temper(stack, "adapters", "upload", str(tmp_path), "--name", name())
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.thorough
def test_a_suite_is_run_and_its_targets_are_compared(stack: Stack, examples: str, tmp_path: Path) -> None:
    adapter, suite = name(), name()
    submit = ("train", "submit", "sft", "--data", examples, "--adapter", adapter, "--epochs", "2")
    assert temper(stack, *submit, "--set", "attach=false", "--wait").returncode == 0
    items = tmp_path / "items.jsonl"
    items.write_text(
        "".join(json.dumps({"prompt": f"What is {n} plus 2?", "expected": n + 2}) + "\n" for n in range(8))
    )
    ok(stack, "eval", "suites", "create", suite, str(items), "--scorer", "exact", "--set", "sampling.max_tokens=6")
    targets = ("--target", "base", "--target", adapter)
    result = temper(stack, "eval", "run", suite, *targets, "--wait")
    assert result.returncode == 0, result.stderr
    assert "step 16/16" in result.stderr
    assert f"base → {adapter}@1" in result.stdout
    (listed,) = ok(stack, "eval", "list", "--adapter", f"{adapter}@1")["data"]
    shown = ok(stack, "eval", "show", listed["id"])
    assert [one["target"] for one in shown["summaries"]] == ["base", f"{adapter}@1"]
    assert shown["summaries"][0]["mean"] == 1.0, "the tiny model knows small sums"
    assert shown["comparisons"][0]["test"] == "mcnemar"
    refused = temper(stack, "eval", "run", suite, "--target", "nobody@1")
    assert refused.returncode == 1
    assert "nobody@1" in refused.stderr


@pytest.mark.thorough
def test_feedback_on_kept_answers_is_trained_on(stack: Stack, tmp_path: Path) -> None:
    good, bad = (ok(stack, "chat", text, "--store", "--max-tokens", "4")["completion_id"] for text in ("hello", "hi"))
    data, adapter = str(tmp_path / "data.jsonl"), name()
    given = [ok(stack, "feedback", "give", good, "--up"), ok(stack, "feedback", "give", bad, "--correct", "Good day!")]
    assert ok(stack, "feedback", "export", "kto", data)["examples"] == 3
    for one in given:
        assert ok(stack, "feedback", "delete", one["id"])["deleted"] is True
    submit = ("train", "submit", "kto", "--data", data, "--adapter", adapter, "--epochs", "1", "--no-attach", "--wait")
    result = temper(stack, *submit)
    assert result.returncode == 0, result.stderr
    assert f"{adapter}@1" in result.stdout


@pytest.mark.thorough
def test_the_doctor_finds_a_running_temper_well(stack: Stack) -> None:
    report = ok(stack, "doctor", "--url", stack.url, "--data-dir", str(stack.data_dir), "--port", str(stack.port))
    found = {check["check"]: (check["status"], check["message"]) for check in report["checks"]}
    asked = {name for name in found if name.partition(".")[0] in ("redis", "s3", "model", "port", "server", "card")}
    assert {name: found[name] for name in asked - {"model.digest"} if found[name][0] != "ok"} == {}
    assert found["port"][1] == f"Temper listens on port {stack.port}"
