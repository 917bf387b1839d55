"""`temper train`: what the options and files of examples say is what is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.runner import JOB, routes, temper
from tests.unit.cli.server import Reply, serving


def examples(tmp_path: Path) -> str:
    file = tmp_path / "examples.jsonl"
    file.write_text('{"prompt": "hi", "completion": "hello"}\n\n{"prompt": "bye", "completion": "goodbye"}\n')
    return str(file)


def test_submit_sends_what_the_options_say(tmp_path: Path) -> None:
    with serving(routes(POST_v1_train_sft=Reply({**JOB, "state": "queued"}, 202))) as (url, requests):
        result = temper(
            *("train", "submit", "sft", "--data", examples(tmp_path), "--adapter", "polite", "--epochs", "5"),
            *("--learning-rate", "0.001", "--no-attach", "--set", "lora.rank=8", "--set", "optimizer.schedule=cosine"),
            *("--idempotency-key", "build-7", "--json"),
            url=url,
        )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["id"] == "job-1"
    assert requests[0].headers["idempotency-key"] == "build-7"
    assert requests[0].json == {
        "examples": [{"prompt": "hi", "completion": "hello"}, {"prompt": "bye", "completion": "goodbye"}],
        "adapter": "polite",
        "epochs": 5,
        "learning_rate": 0.001,
        "attach": False,
        "lora": {"rank": 8},
        "optimizer": {"schedule": "cosine"},
    }


def test_conditions_on_suites_are_a_publish_if(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "hi", "completion": "Good day!"}\n')
    job = ("train", "submit", "sft", "--data", str(data), "--adapter", "a")
    with serving(routes(POST_v1_train_sft=Reply({"id": "job-1"}, 202))) as (url, requests):
        result = temper(*job, "--gain", "sums", "--gain", "dates@2=0.1", "--no-loss", "words=0.05", url=url)
        assert result.exit_code == 0, result.stderr
        for wrong in (("--no-loss", "words"), ("--gain", "sums=a"), ("--no-loss", "words=0")):
            assert temper(*job, *wrong, url=url).exit_code == 2
    assert requests[0].json["publish_if"] == {
        "gain": [{"suite": "sums"}, {"suite": "dates@2", "min_gain": 0.1}],
        "no_loss": [{"suite": "words", "max_loss": 0.05}],
    }
    assert len(requests) == 1


def test_submit_grpo_groups_strings_with_rewards(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl"
    file.write_text('{"prompt": "2+2=", "completions": ["4", "5"], "rewards": [1, 0]}\n')
    with serving(routes(POST_v1_train_grpo=Reply(JOB, 202))) as (url, requests):
        assert temper("train", "submit", "grpo", "--data", str(file), "--adapter", "sums", url=url).exit_code == 0
    group = {"prompt": "2+2=", "completions": [{"text": "4", "reward": 1}, {"text": "5", "reward": 0}]}
    assert requests[0].json["groups"] == [group]


def test_submit_grpo_says_which_were_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl"
    row = {
        "prompt": "2+2=",
        "completions": ["4", "5"],
        "rewards": [1, 0],
        "truncated": [False, True],
        "temperature": 0.7,
    }
    file.write_text(json.dumps(row))
    with serving(routes(POST_v1_train_grpo=Reply(JOB, 202))) as (url, requests):
        assert temper("train", "submit", "grpo", "--data", str(file), "--adapter", "sums", url=url).exit_code == 0
    first, second = requests[0].json["groups"][0]["completions"]
    assert first == {"text": "4", "reward": 1, "truncated": False, "temperature": 0.7}
    assert second == {"text": "5", "reward": 0, "truncated": True, "temperature": 0.7}


LINE_ENDS = "".join(map(chr, (0x2028, 0x2029, 0x85, 0x0B, 0x0C, 0x1C, 0x1D, 0x1E)))
"""What Python's splitlines() takes for line ends besides line feed and carriage return."""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_with_a_line_feed_only(tmp_path: Path, encoding: str, end: str) -> None:
    """jsonlines.org; RFC 8259 lets the others stand in strings (those above U+001F as they are)."""
    texts = [f"Good{character}day!" for character in LINE_ENDS]
    rows = [{"prompt": "hello", "completion": text} for text in texts]
    file = tmp_path / "data.jsonl"
    file.write_bytes(
        "".join(json.dumps(row, ensure_ascii=False) + end for row in [*rows[:3], rows[3], *rows[4:]]).encode(encoding)
    )
    with serving(routes(POST_v1_train_sft=Reply(JOB, 202))) as (url, requests):
        result = temper("train", "submit", "sft", "--data", str(file), "--adapter", "a", url=url)
    assert result.exit_code == 0, result.stderr
    assert requests[0].json["examples"] == rows
    file.write_bytes(file.read_bytes() + b"{}")
    result = temper("train", "submit", "sft", "--data", str(file), "--adapter", "a", url="http://127.0.0.1:9")
    assert f"data.jsonl:{len(rows) + 1}: examples[{len(rows)}]" in result.stderr


def test_a_job_file_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    body = {"adapter": "a", "examples": [{"text": "x"}]}
    file.write_text(json.dumps({"kind": "sft", **body}), encoding="utf-8-sig")
    with serving(routes(POST_v1_train_sft=Reply(JOB, 202))) as (url, requests):
        assert temper("train", "submit", str(file), url=url).exit_code == 0
    assert requests[0].json == body


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"promt": "a", "completion": "b"}', "examples[0]: unknown field 'promt': did you mean 'prompt'?"),
        ('{"prompt": "a", "completion": "b", "zzz": 1}', "examples[0]: unknown field 'zzz': remove it"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "contents": "b"}]}',
            "examples[0]: messages[1]: unknown field 'contents': did you mean 'content'?",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant"}]}',
            "messages[0].content[0].type: parts of type 'image_url'",
        ),
        ('{"messages": [{"role": "assistant", "content": "b"}]}', "examples[0]: messages has no turn to learn"),
        ('{"prompt": [{"role": "assistant", "content": "a"}], "completion": "b"}', "prompt must end with the turn"),
        ('[\n{"prompt": "a", "completion": "b"}\n]', "the file is one JSON array: write its objects one a line"),
        ('[{"prompt": "a", "completion": "b"}]', "the file is one JSON array: write its objects one a line"),
        ('{"prompt": "\\ud800", "completion": "b"}', "data.jsonl:1 has half of a character"),
        ('{"prompt": "a", "completion": ' + "9" * 5000 + "}", "data.jsonl:1 has an integer of too many digits"),
        ('{\n"prompt": "a",\n"completion": "b"\n}', "the file is one JSON value over several lines"),
        ("[" * 100_000, "data.jsonl:1 is not JSON"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_the_file(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    result = temper("train", "submit", "sft", "--data", str(file), "--adapter", "a", url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Value error" not in result.stderr
    assert "Extra inputs" not in result.stderr


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"epoch": 3}, "unknown field 'epoch': did you mean 'epochs'?"),
        ({"lora": {"ranks": 3}}, "lora: unknown field 'ranks': did you mean 'rank'?"),
        (
            {"lora": {"target_modules": ["qproj"]}},
            "lora.target_modules: 'qproj' is no linear layer of the model: did you",
        ),
        ({"learning_rate": 0.1, "optimizer": {"learning_rate": 0.2}}, "is 0.1 and optimizer.learning_rate 0.2"),
        ({"eval_fraction": 0.5}, "eval_fraction holds one of the examples out, and there is only one"),
        ({"learning_rate": 7}, "learning_rate: Input should be less than or equal to 1"),
    ],
)
def test_a_job_file_is_checked_in_its_own_words(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"kind": "sft", "adapter": "a", "examples": [{"text": "x"}], **fields}))
    result = temper("train", "submit", str(file), url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert f"the job is not valid: {says}" in result.stderr or says in result.stderr
    assert "Value error" not in result.stderr


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_weights_of_torch_save_have_a_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK")
    (tmp_path / "adapter_config.json").write_text("{}")
    result = temper("adapters", "upload", str(tmp_path), "--name", "polite", url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert f"does not exist, only {name}: weights are taken as adapter_model.safetensors only" in result.stderr
    assert "save_pretrained" in result.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ('{"prompt": "hi"}', "examples[0]"),
        ('{"prompt": "hi", "completion": "x"}\nnonsense', "examples.jsonl:2 is not JSON"),
        ("[1]", "must be a JSON object"),
    ],
)
def test_bad_data_is_a_usage_error_that_names_the_place(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "examples.jsonl"
    file.write_text(content)
    with serving(lambda _: Reply(JOB, 202)) as (url, requests):
        result = temper("train", "submit", "sft", "--data", str(file), "--adapter", "polite", url=url)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not requests


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("dpo", {"prompt": "hi", "chosen": "Good day!", "rejected": "yo"}),
        ("kto", {"messages": [{"role": "user", "content": "hi"}], "completion": "Good day!", "label": True}),
        ("sft", {"text": "Once upon a time"}),
    ],
)
def test_submit_reads_every_kind_of_example(tmp_path: Path, kind: str, row: dict[str, Any]) -> None:
    rows = [row] if kind != "kto" else [row, row | {"label": False}]
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    with serving(routes(**{f"POST_v1_train_{kind}": Reply(JOB, 202)})) as (url, requests):
        result = temper("train", "submit", kind, "--data", str(file), "--adapter", "a", "--set", "beta=0.2", url=url)
        if kind == "sft":  # which has no beta
            assert result.exit_code == 2
            assert not requests
            result = temper("train", "submit", kind, "--data", str(file), "--adapter", "a", url=url)
    assert result.exit_code == 0, result.stderr
    assert requests[0].json["examples"] == rows


@pytest.mark.parametrize(
    ("kind", "lines", "says"),
    [
        ("dpo", ['{"prompt": "a", "chosen": "b", "rejected": "c"}', "", '{"prompt": "a", "chosen": "b"}'], ":3: "),
        ("dpo", ['{"prompt": "a", "chosen": "b", "rejected": "b"}'], "examples[0]: chosen and rejected"),
        ("kto", ['{"prompt": "a", "completion": "b", "label": "so-so"}'], ":1: examples[0]: label"),
        ("kto", ['{"prompt": "a", "completion": "b", "label": true}'], "every label is true"),
        ("sft", ['{"prompt": "a", "completion": "b"}', '{"text": ""}'], ":2: examples[1]: text"),
        (
            "grpo",
            ['{"completion_id": "x", "reward": 1}', '{"completion_id": "y"}'],
            ":2: rollouts[1]: the field 'reward'",
        ),
        (
            "grpo",
            ["", '{"prompt": "a", "completions": [{"text": "b"}]}'],
            ":2: groups[0]: completions[0]: the field 'reward'",
        ),
        ("grpo", ['{"prompt": "a", "completions": ["b"], "rewards": []}'], "data.jsonl:1: completions and rewards"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, kind: str, lines: list[str], says: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(lines))
    result = temper("train", "submit", kind, "--data", str(file), "--adapter", "a", url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_job_file_of_an_unknown_kind_lists_the_kinds(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text('{"kind": "ppo"}')
    result = temper("train", "submit", str(file), url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert '"sft", "dpo", "kto", "grpo"' in result.stderr


def test_submit_a_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    job = {"kind": "grpo", "adapter": "sums", "prompt": "2+2=", "completions": ["4", "5"], "rewards": [1.0, 0.0]}
    file.write_text(json.dumps(job))
    with serving(routes(POST_v1_train_grpo=Reply(JOB, 202))) as (url, requests):
        assert temper("train", "submit", str(file), url=url).exit_code == 0
    del job["kind"]
    assert requests[0].json == job


def test_unequal_rewards_are_refused_here(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl"
    file.write_text('{"prompt": "2+2=", "completions": ["4", "5"], "rewards": [1]}\n')
    result = temper("train", "submit", "grpo", "--data", str(file), "--adapter", "sums", url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "same length" in result.stderr


def test_help_tells_the_defaults_of_training() -> None:
    told = " ".join(temper("train", "submit", "--help").stdout.replace("│", " ").split())
    assert "at 4B: sft 2e-4, dpo and kto 2e-5, grpo 4e-5, opd and draft 1e-4; higher for smaller models" in told
    assert "sft and draft 3, or as many as make 30 steps; dpo and kto 1, or 20 steps" in told


def test_a_misspelt_kind_is_named(tmp_path: Path) -> None:
    result = temper("train", "submit", "sftt", "--data", examples(tmp_path), "--adapter", "polite")
    assert result.exit_code == 2
    assert "sft, dpo, kto, grpo, opd" in result.stderr
    assert "'sftt' is none" in result.stderr
