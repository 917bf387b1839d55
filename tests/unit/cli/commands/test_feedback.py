"""`temper feedback`: notes of answers that a server keeps, and what jobs learn from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from services.common.jobs import JOBS
from tests.unit.cli.runner import temper
from tests.unit.cli.server import Reply, Seen, serving

KEPT: dict[str, tuple[list[str], dict[str, Any]]] = {
    "chatcmpl-1": (["hello"], {"content": "Good day!"}),
    "chatcmpl-2": (["hello"], {"content": "what"}),
    "chatcmpl-3": (["hello", "Hi!", "bye"], {"content": "See you."}),
    "chatcmpl-4": (["hello"], {"content": None, "tool_calls": [{"id": "1"}]}),
}


def answer(seen: Seen) -> Reply:
    """A server that keeps these answers, and tells one message of a page."""
    name, _, rest = seen.path.removeprefix("/v1/chat/completions/").partition("/")
    if name not in KEPT:
        return Reply({"error": {"message": f"no such stored completion: {name}"}}, 404)
    texts, message = KEPT[name]
    if not rest:
        return Reply({"id": name, "choices": [{"message": {"role": "assistant", **message}}]})
    number = int(seen.path.rpartition("after=")[2]) + 1 if "after=" in seen.path else 0
    turn = {"id": str(number), "role": ("user", "assistant")[number % 2], "content": texts[number], "name": None}
    return Reply({"data": [turn], "last_id": str(number), "has_more": number + 1 < len(texts)})


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    with serving(answer) as (url, _):
        yield url


def give(url: str, *words: str) -> Result:
    return temper("feedback", "give", *words, url=url)


def exported(kind: str) -> list[dict[str, Any]]:
    result = temper("feedback", "export", kind, "out.jsonl")
    assert result.exit_code == 0, result.stderr
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert result.stdout.startswith(f"{len(found)} example")
    JOBS[kind].model_validate({"adapter": "a", "kind": kind, "examples": found})
    return found


def test_notes_become_what_each_kind_of_job_learns_from(url: str) -> None:
    assert give(url, "chatcmpl-1", "--up").exit_code == 0
    assert give(url, "chatcmpl-2", "--correct", "Good morning!").exit_code == 0
    assert give(url, "chatcmpl-3", "--down").exit_code == 0
    hello = {"role": "user", "content": "hello"}
    assert exported("sft") == [
        {"messages": [hello, {"role": "assistant", "content": text}]} for text in ("Good day!", "Good morning!")
    ]
    assert exported("dpo") == [{"messages": [hello], "chosen": "Good morning!", "rejected": "what"}]
    assert [(one["completion"], one["label"]) for one in exported("kto")] == [
        ("Good day!", True),
        ("Good morning!", True),
        ("what", False),
        ("See you.", False),
    ]


def test_only_the_answer_that_was_rated_is_learnt(url: str) -> None:
    give(url, "chatcmpl-3", "--up")
    (example,) = exported("sft")
    assert [turn.get("weight") for turn in example["messages"]] == [None, 0, None, None]


def test_one_answer_over_another_and_a_second_thought(url: str) -> None:
    give(url, "chatcmpl-1", "--down")
    assert give(url, "chatcmpl-1", "--over", "chatcmpl-2").exit_code == 0
    assert [(one["chosen"], one["rejected"]) for one in exported("dpo")] == [("Good day!", "what")]
    listed = json.loads(temper("feedback", "list", "--json").stdout)
    assert [(one["completion"], one["says"]) for one in listed] == [("chatcmpl-1", "preferred")]
    assert "preferred" in temper("feedback", "list").stdout


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("chatcmpl-1",), "say one thing", 2),
        (("chatcmpl-1", "--up", "--down"), "say one thing", 2),
        (("chatcmpl-9", "--up"), "no such stored completion", 1),
        (("chatcmpl-1", "--over", "chatcmpl-3"), "answers other messages", 1),
        (("chatcmpl-4", "--up"), "is not one answer in words", 1),
    ],
)
def test_refusals_note_nothing(url: str, words: tuple[str, ...], says: str, code: int) -> None:
    result = give(url, *words)
    assert result.exit_code == code
    assert says in result.stderr
    assert not Path("feedback.jsonl").exists()


def test_what_a_kind_misses_is_told(url: str) -> None:
    assert "`temper feedback give" in temper("feedback", "export", "sft", "out.jsonl").stderr
    give(url, "chatcmpl-1", "--up")
    assert "give --correct or --over" in temper("feedback", "export", "dpo", "out.jsonl").stderr
    assert "give --up and --down" in temper("feedback", "export", "kto", "out.jsonl").stderr
    assert not Path("out.jsonl").exists()


def test_a_file_of_something_else_is_not_written_over(url: str) -> None:
    Path("feedback.jsonl").write_text('{"prompt": "mine"}\n')
    assert "feedback.jsonl:1 is no note" in give(url, "chatcmpl-1", "--up").stderr
    assert Path("feedback.jsonl").read_text() == '{"prompt": "mine"}\n'
