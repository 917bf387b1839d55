"""What the commands send, print, and exit with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.http.client import _parse_events
from cli.local.ports import free_ports
from cli.main import app
from tests.unit.cli.server import Reply, Seen, serving, sse

ROOT = Path(__file__).resolve().parents[4]
JOB: dict[str, Any] = {
    "id": "job-1",
    "kind": "sft",
    "adapter": "polite",
    "state": "succeeded",
    "created_at": 1.0,
    "attempts": 1,
    "progress": {"step": 2, "total_steps": 2},
    "metrics": {"loss": 0.5},
    "result_adapter": "polite@1",
}
VERSIONS = [{"name": "polite", "version": n, "current": n == 3, "attached": n == 3} for n in (1, 2, 3)]


def temper(*args: str, url: str | None = None, stdin: str | None = None) -> Result:
    command = [*args, "--url", url] if url else list(args)
    return CliRunner().invoke(app, command, input=stdin, env={"TEMPER_URL": None, "COLUMNS": "200", "NO_COLOR": "1"})


def routes(**answers: Reply | Callable[[Seen], Reply]) -> Callable[[Seen], Reply]:
    """By "METHOD path" without the query, with _ for /."""

    def answer(seen: Seen) -> Reply:
        key = f"{seen.method}{seen.path.split('?')[0]}".replace("/", "_").replace("-", "").replace("@", "")
        found = answers.get(key)
        if found is None:
            return Reply({"error": {"message": f"no route {key}", "code": "not_found"}}, 404)
        return found(seen) if callable(found) else found

    return answer


def examples(tmp_path: Path) -> str:
    file = tmp_path / "examples.jsonl"
    file.write_text('{"prompt": "hi", "completion": "hello"}\n\n{"prompt": "bye", "completion": "goodbye"}\n')
    return str(file)


def test_version_as_text_and_as_json() -> None:
    text = temper("version").output.strip()
    assert text.count(".") == 2
    assert json.loads(temper("version", "--json").output) == {"version": text}


def test_no_server_is_exit_3_with_the_way_out() -> None:
    result = temper("adapters", "list", url=f"http://127.0.0.1:{free_ports(1)[0]}")
    assert result.exit_code == 3
    assert "temper up" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("status", "code"), [(404, 1), (409, 1), (422, 1), (503, 3), (429, 3)])
def test_refusals_show_the_servers_words(status: int, code: int) -> None:
    with serving(lambda _: Reply({"error": {"message": "polite@9 does not exist"}}, status)) as (url, _):
        result = temper("adapters", "attach", "polite@9", url=url)
        as_json = temper("adapters", "attach", "polite@9", "--json", url=url)
    assert result.exit_code == code
    assert "polite@9 does not exist" in result.stderr
    assert json.loads(as_json.stdout)["error"]["message"] == "polite@9 does not exist"
    assert as_json.exit_code == code


@pytest.mark.parametrize("ref", ["../../etc", "a@0", "a@x", "base", "a b"])
def test_bad_names_are_usage_errors_and_send_nothing(ref: str) -> None:
    with serving(lambda _: Reply({})) as (url, requests):
        assert temper("adapters", "attach", ref, url=url).exit_code == 2
    assert not requests


def test_not_a_temper_server_is_said_so() -> None:
    with serving(lambda _: Reply("<html>hello</html>", content_type="text/html")) as (url, _):
        result = temper("adapters", "list", url=url)
    assert result.exit_code == 3
    assert "not a Temper gateway" in result.stderr


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


def state(name: str, **more: Any) -> dict[str, Any]:
    return {"kind": "state", "data": {"state": name, **more}}


def progress(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "progress", "data": {"step": step, "total_steps": 2, "loss": loss}}


def test_watch_goes_on_where_a_broken_stream_ended() -> None:
    first = sse(("1-0", "state", state("running")), ("2-0", "progress", progress(1, 0.9)))
    second = sse(("3-0", "progress", progress(2, 0.5)), ("4-0", "state", state("succeeded")))

    def events(seen: Seen) -> Reply:
        return second if seen.headers.get("last-event-id") == "2-0" else first

    running = iter([{**JOB, "state": "running"}, JOB])
    answer = routes(GET_v1_train_jobs_job1_events=events, GET_v1_train_jobs_job1=lambda _: Reply(next(running)))
    with serving(answer) as (url, _):
        result = temper("train", "watch", "job-1", "--json", url=url)
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["id"] for line in lines] == ["1-0", "2-0", "3-0", "4-0", "job-1"]
    assert lines[1]["data"]["loss"] == 0.9


def test_watch_shows_steps_and_exits_1_when_the_job_fails() -> None:
    failed = {**JOB, "state": "failed", "reason": "the loss is not finite"}
    events = sse(("1-0", "progress", progress(1, 0.9)), ("2-0", "state", state("failed")))
    answer = routes(GET_v1_train_jobs_job1_events=events, GET_v1_train_jobs_job1=Reply(failed))
    with serving(answer) as (url, _):
        result = temper("train", "watch", "job-1", url=url)
    assert result.exit_code == 1
    assert "step 1/2" in result.stderr
    assert "loss 0.9" in result.stderr
    assert "failed: the loss is not finite" in result.stderr


def test_what_a_job_has_learnt_is_said_at_its_end() -> None:
    learnt = {
        **JOB,
        "parent": "polite@0",
        "settings": {"learning_rate": 0.002, "steps": 30, "epochs": 30},
        "metrics": {"loss": 7.2, "loss_before": 9.16, "loss_after": 7.27},
        "notes": ["goes on from polite@0", "hardly learnt: give more epochs"],
    }
    note = {"message": "hardly learnt: give more epochs", "note": True}
    events = sse(
        ("1-0", "state", state("queued")),
        ("2-0", "log", {"kind": "log", "data": note}),
        ("3-0", "log", {"kind": "log", "data": {"message": "resumed after step 3"}}),
        ("4-0", "state", state("succeeded")),
    )
    answer = routes(GET_v1_train_jobs_job1_events=events, GET_v1_train_jobs_job1=Reply(learnt))
    with serving(answer) as (url, _):
        watched = temper("train", "watch", "job-1", url=url)
        status = temper("train", "status", "job-1", url=url)
    assert watched.exit_code == 0, watched.stderr
    assert watched.stdout == "job-1 succeeded: polite@1 (loss on its examples 9.16 → 7.27)\n"
    told = watched.stderr.splitlines()
    assert told[-2:] == ["note: goes on from polite@0", "note: hardly learnt: give more epochs"]
    assert told[:-2] == ["state queued", "log resumed after step 3", "state succeeded"]
    for line in ("settings  learning_rate 0.002  steps 30  epochs 30", "from      polite@0", "note      hardly learnt"):
        assert line in status.stdout


def test_help_tells_the_defaults_of_training() -> None:
    told = " ".join(temper("train", "submit", "--help").stdout.replace("│", " ").split())
    assert "at 4B: sft 2e-4, dpo and kto 2e-5, grpo 4e-5, opd 1e-4; higher for smaller models" in told
    assert "sft 3, or as many as make 30 steps; dpo and kto 1, or 20 steps" in told


def test_a_misspelt_kind_is_named(tmp_path: Path) -> None:
    result = temper("train", "submit", "sftt", "--data", examples(tmp_path), "--adapter", "polite")
    assert result.exit_code == 2
    assert "sft, dpo, kto, grpo, opd" in result.stderr
    assert "'sftt' is none" in result.stderr


def test_wait_times_out_with_4() -> None:
    answer = routes(
        GET_v1_train_jobs_job1_events=sse(("1-0", "progress", progress(1, 0.9))),
        GET_v1_train_jobs_job1=Reply({**JOB, "state": "running"}),
    )
    with serving(answer) as (url, _):
        assert temper("train", "watch", "job-1", "--timeout", "0", url=url).exit_code == 4


def test_wait_times_out_with_4_although_nothing_happens() -> None:
    over = threading.Event()

    def silent(_: Seen) -> Reply:
        over.wait(20)
        return sse()

    answer = routes(GET_v1_train_jobs_job1_events=silent, GET_v1_train_jobs_job1=Reply({**JOB, "state": "queued"}))
    with serving(answer) as (url, _):
        started = time.monotonic()
        result = temper("train", "watch", "job-1", "--timeout", "0.3", url=url)
        over.set()
    assert result.exit_code == 4
    assert time.monotonic() - started < 15


def test_a_sign_of_life_is_no_event_but_is_noticed() -> None:
    lines = iter([": keep-alive", "", "data: 1", "", ":", ""])
    seen: list[str] = []
    events = [event.data for event in _parse_events(lines, lambda: seen.append("alive"))]
    assert events == ["1"]
    assert seen == ["alive", "alive"]


def test_rollback_attaches_the_version_before() -> None:
    answer = routes(
        GET_v1_adapters=Reply({"data": [], "attached": "polite@3"}),
        GET_v1_adapters_polite_versions=Reply({"data": VERSIONS}),
        POST_v1_adapters_polite_attach=Reply({"attached": "polite@2"}),
    )
    with serving(answer) as (url, requests):
        result = temper("adapters", "rollback", url=url)
    assert result.exit_code == 0, result.stderr
    assert requests[-1].json == {"version": 2}
    assert "polite@2" in result.stdout


def test_rollback_without_anything_attached_is_refused() -> None:
    with serving(routes(GET_v1_adapters=Reply({"data": [], "attached": None}))) as (url, requests):
        assert temper("adapters", "rollback", url=url).exit_code == 1
    assert [seen.method for seen in requests] == ["GET"]


def test_download_leaves_no_half_file_behind(tmp_path: Path) -> None:
    def download(seen: Seen) -> Reply:
        if "safetensors" in seen.path:
            return Reply(b"weights", headers={"x-temper-adapter": "polite@3"}, content_type="application/octet-stream")
        return Reply({"error": {"message": "gone"}}, 404)

    target = tmp_path / "out"
    with serving(routes(GET_v1_adapters_polite_download=download)) as (url, _):
        assert temper("adapters", "download", "polite@3", str(target), url=url).exit_code == 1
    assert sorted(file.name for file in target.iterdir()) == ["adapter_model.safetensors"]


def test_upload_needs_both_files(tmp_path: Path) -> None:
    result = temper("adapters", "upload", str(tmp_path), "--name", "polite", url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "adapter_model.safetensors does not exist" in result.stderr


def chunks(*pieces: str, done: bool = True) -> Reply:
    events = []
    for piece in pieces:
        choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None, "completion_id": "c-1"}
        events.append(("", "message", {"adapter": "polite@3", "choices": [choice]}))
    end = {"index": 0, "delta": {}, "finish_reason": "stop", "completion_id": "c-1"}
    events.append(("", "message", {"adapter": "polite@3", "choices": [end]}))
    events.append(("", "message", {"adapter": "polite@3", "choices": [], "usage": {"total_tokens": 5}}))
    return sse(*events, done=done)


def test_chat_streams_one_answer_and_names_the_version() -> None:
    answer = routes(GET_v1_models=Reply({"data": [{"id": "qwen3.5"}]}), POST_v1_chat_completions=chunks("Hel", "lo!"))
    with serving(answer) as (url, requests):
        text = temper("chat", "hi", "--seed", "7", url=url)
        as_json = temper("chat", "-", "--json", url=url, stdin="hi")
    assert text.stdout == "Hello!\n"
    assert "polite@3" in text.stderr
    assert requests[1].json["seed"] == 7
    assert requests[1].json["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(as_json.stdout)["content"] == "Hello!"
    assert json.loads(as_json.stdout)["usage"] == {"total_tokens": 5}


def test_chat_that_breaks_off_is_exit_3() -> None:
    answer = routes(GET_v1_models=Reply({"data": [{"id": "m"}]}), POST_v1_chat_completions=chunks("Hel", done=False))
    with serving(answer) as (url, _):
        assert temper("chat", "hi", url=url).exit_code == 3
        assert temper("chat", " ", url=url).exit_code == 2


def test_rollback_of_a_name_moves_its_pointer() -> None:
    answer = Reply({"before": "polite@3", "current": "polite@1", "attached": "polite@1"})
    with serving(routes(POST_v1_adapters_polite_rollback=answer)) as (url, requests):
        plain = temper("adapters", "rollback", "polite", url=url)
        to = temper("adapters", "rollback", "polite", "--to", "1", "--json", url=url)
        wrong = temper("adapters", "rollback", "polite@1", url=url)
    assert plain.exit_code == to.exit_code == 0, plain.stderr
    assert "polite@3 → polite@1 is current, attached polite@1" in plain.stdout
    assert json.loads(to.stdout)["current"] == "polite@1"
    assert [seen.json for seen in requests] == [{}, {"version": 1}]
    assert wrong.exit_code == 2
    assert "--to 1" in wrong.stderr


def test_prune_says_what_goes_and_what_stays() -> None:
    kept = [{"version": "polite@3", "reason": "current"}]
    answer = Reply({"removed": ["polite@1", "polite@2"], "kept": kept, "freed_bytes": 3 * 2**20})
    with serving(routes(POST_v1_adapters_polite_prune=answer)) as (url, requests):
        result = temper("adapters", "prune", "polite", "--keep", "1", "--days", "2.5", "--dry-run", url=url)
        nothing = temper("adapters", "prune", "polite", url=url)
    assert result.exit_code == 0, result.stderr
    assert "would remove polite@1, polite@2 (3.0 MiB)" in result.stdout
    assert "kept polite@3: current" in result.stdout
    assert [seen.json for seen in requests] == [{"keep": 1, "days": 2.5, "dry_run": True}]
    assert nothing.exit_code == 2
    assert "--keep" in nothing.stderr


def merge_routes(state: str = "succeeded", **more: Any) -> Callable[[Seen], Reply]:
    job = {
        **JOB,
        "kind": "merge",
        "state": state,
        "metrics": {"merge_error_max": 0.25, "merge_error_mean": 0.1},
        **more,
    }
    layers = {"kind": "progress", "data": {"step": 2, "total_steps": 2, "merge_error_max": 0.25}}
    return routes(
        POST_v1_adapters_out_merge=Reply({**job, "state": "queued"}, 202),
        GET_v1_train_jobs_job1_events=sse(("1-0", "progress", layers), ("2-0", "state", {"kind": "state", "data": {}})),
        GET_v1_train_jobs_job1=Reply(job),
    )


def test_merge_sends_weights_and_waits() -> None:
    with serving(merge_routes()) as (url, requests):
        result = temper(
            *("adapters", "merge", "out", "--from", "a@3:0.7", "--from", "b:-0.3", "--from", "c"),
            *("--method", "ties", "--rank", "16", "--density", "0.2", "--seed", "4", "--idempotency-key", "k"),
            url=url,
        )
    assert result.exit_code == 0, result.stderr
    assert requests[0].json == {
        "sources": [{"adapter": "a@3", "weight": 0.7}, {"adapter": "b", "weight": -0.3}, {"adapter": "c"}],
        "method": "ties",
        "rank": 16,
        "density": 0.2,
        "scale": 1.0,
        "seed": 4,
        "attach": False,
    }
    assert requests[0].headers["idempotency-key"] == "k"
    assert "merge_error_max 0.25" in result.stderr
    assert "cuts off 10.00% of a layer's delta on average, 25.00% at most" in result.stdout


def test_a_merge_that_fails_is_exit_1() -> None:
    with serving(merge_routes("failed", reason="the exact sum has rank 96: give rank")) as (url, _):
        waited = temper("adapters", "merge", "out", "--from", "a", url=url)
        queued = temper("adapters", "merge", "out", "--from", "a", "--no-wait", url=url)
    assert waited.exit_code == 1
    assert "give rank" in waited.stderr
    assert queued.exit_code == 0
    assert "temper train watch job-1" in queued.stdout


@pytest.mark.parametrize("source", ["a:x", "a@0:1", "../a:1", "base:1", ":1"])
def test_malformed_sources_send_nothing(source: str) -> None:
    with serving(merge_routes()) as (url, requests):
        assert temper("adapters", "merge", "out", "--from", source, url=url).exit_code == 2
    assert not requests


def tiny_adapter(directory: Path) -> Path:
    """Written by the models' own tools, in a process of its own: this one loads no torch."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from services.engine.models.config import ModelConfig\n"
        "from tests.unit.adapter_tools.adapters import adapter\n"
        "for name, data in adapter(ModelConfig.from_directory('models/tiny')).items():\n"
        "    (Path(sys.argv[1]) / name).write_bytes(data)\n"
    )
    directory.mkdir()
    subprocess.run([sys.executable, "-c", code, str(directory)], cwd=ROOT, check=True, timeout=120)
    return directory


def test_convert_and_extract_directories(tmp_path: Path) -> None:
    source = f"{tiny_adapter(tmp_path / 'adapter')}/"
    result = temper("adapters", "convert", source, str(tmp_path / "there"), "--to", "multimodal", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) | {"bytes": 0, "out": ""} == {
        "from": "text",
        "to": "multimodal",
        "bytes": 0,
        "out": "",
    }
    assert (tmp_path / "there" / "adapter_model.safetensors").exists()
    again = temper("adapters", "convert", source, str(tmp_path / "there"), "--to", "text")
    assert again.exit_code == 2
    assert "is there already" in again.stderr

    tiny = str(ROOT / "models" / "tiny")
    refused = temper("adapters", "extract", source, str(tmp_path / "out"), "--base", tiny)
    assert refused.exit_code == 2
    assert "--any-base" in refused.stderr
    result = temper("adapters", "extract", source, str(tmp_path / "out"), "--base", tiny, "--any-base")
    assert result.exit_code == 0, result.stderr
    assert "layers changed" in result.stdout
    assert (tmp_path / "out" / "config.json").exists()
    missing = temper("adapters", "extract", "./nobody", str(tmp_path / "new"), "--base", tiny)
    assert missing.exit_code == 2
    assert "nobody/adapter_model.safetensors does not exist" in missing.stderr


def test_extract_without_the_engines_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "hidden"
    (hidden / "torch").mkdir(parents=True)
    (hidden / "torch" / "__init__.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hidden), str(ROOT)]))
    source = tmp_path / "adapter"
    source.mkdir()
    result = temper("adapters", "convert", f"{source}/", str(tmp_path / "out"), "--to", "text")
    assert result.exit_code == 1
    assert "torch is not installed here" in result.stderr
    assert "temper[engine]" in result.stderr


def test_download_brings_the_manifest(tmp_path: Path) -> None:
    manifest = {"name": "polite", "version": 3, "base_digest": "d", "files": {}, "digest": "x", "created_at": 1.0}
    listed = {**manifest, "object": "adapter.version", "id": "polite@3", "current": True, "attached": False}
    answer = routes(
        GET_v1_adapters_polite_download=Reply(b"bytes", content_type="application/octet-stream"),
        GET_v1_adapters_polite_versions=Reply({"data": [{**listed, "size_bytes": 9}]}),
    )
    with serving(answer) as (url, _):
        result = temper("adapters", "download", "polite@3", str(tmp_path / "out"), url=url)
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
