"""`temper feedback`: what is said of answers that a server keeps, and what jobs learn from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import Result

from services.common.jobs import JOBS
from services.learning.feedback.record import Feedback
from tests.unit.cli.runner import temper
from tests.unit.cli.server import Reply, Seen, serving

KEPT: dict[str, tuple[list[str], dict[str, Any]]] = {
    "chatcmpl-1": (["hello"], {"content": "Good day!"}),
    "chatcmpl-2": (["hello"], {"content": "what"}),
    "chatcmpl-3": (["hello", "Hi!", "bye"], {"content": "See you."}),
    "chatcmpl-4": (["hello"], {"content": None, "tool_calls": [{"id": "1"}]}),
}


class Server:
    """Keeps these answers, tells one message of a page, and one opinion of a page."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        """Newest first."""

    def answer(self, seen: Seen) -> Reply:
        if seen.path.startswith("/v1/feedback"):
            return self._feedback(seen)
        name, _, rest = seen.path.removeprefix("/v1/chat/completions/").partition("/")
        if name not in KEPT:
            return Reply({"error": {"message": f"no such stored completion: {name}"}}, 404)
        texts, message = KEPT[name]
        if not rest:
            return Reply({"id": name, "choices": [{"message": {"role": "assistant", **message}}]})
        number = int(seen.path.rpartition("after=")[2]) + 1 if "after=" in seen.path else 0
        turn = {"id": str(number), "role": ("user", "assistant")[number % 2], "content": texts[number], "name": None}
        return Reply({"data": [turn], "last_id": str(number), "has_more": number + 1 < len(texts)})

    def _feedback(self, seen: Seen) -> Reply:
        if seen.method == "POST":
            body = json.loads(seen.body)
            names = [*Feedback.model_fields]
            self.said.insert(0, {**dict.fromkeys(names), **body, "id": f"fb_{len(self.said)}", "used_by": []})
            return Reply(self.said[0])
        query = parse_qs(urlsplit(seen.path).query)
        ids = [one["id"] for one in self.said]
        start = ids.index(query["after"][0]) + 1 if "after" in query else 0
        return Reply({"data": self.said[start : start + 1], "has_more": start + 1 < len(ids)})


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    with serving(Server().answer) as (url, _):
        yield url


def give(url: str, *words: str) -> Result:
    return temper("feedback", "give", *words, url=url)


def exported(url: str, kind: str) -> list[dict[str, Any]]:
    result = temper("feedback", "export", kind, "out.jsonl", url=url)
    assert result.exit_code == 0, result.stderr
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert result.stdout.startswith(f"{len(found)} example")
    JOBS[kind].model_validate({"adapter": "a", "kind": kind, "examples": found})
    return found


def test_opinions_become_what_each_kind_of_job_learns_from(url: str) -> None:
    assert give(url, "chatcmpl-1", "--up").exit_code == 0
    assert give(url, "chatcmpl-2", "--correct", "Good morning!").exit_code == 0
    assert give(url, "chatcmpl-3", "--down").exit_code == 0
    hello = {"role": "user", "content": "hello"}
    assert exported(url, "sft") == [
        {"messages": [hello, {"role": "assistant", "content": text}]} for text in ("Good day!", "Good morning!")
    ]
    assert exported(url, "dpo") == [{"messages": [hello], "chosen": "Good morning!", "rejected": "what"}]
    assert [(one["completion"], one["label"]) for one in exported(url, "kto")] == [
        ("Good day!", True),
        ("Good morning!", True),
        ("what", False),
        ("See you.", False),
    ]


def test_only_the_answer_that_was_rated_is_learnt(url: str) -> None:
    give(url, "chatcmpl-3", "--up")
    (example,) = exported(url, "sft")
    assert [turn.get("weight") for turn in example["messages"]] == [None, 0, None, None]


def test_one_answer_over_another_and_a_second_thought(url: str) -> None:
    give(url, "chatcmpl-1", "--down")
    assert give(url, "chatcmpl-1", "--over", "chatcmpl-2", "--user", "ann").exit_code == 0
    assert [(one["chosen"], one["rejected"]) for one in exported(url, "dpo")] == [("Good day!", "what")]
    listed = json.loads(temper("feedback", "list", "--json", url=url).stdout)
    assert [(one["preferred_over"], one["thumb"]) for one in listed] == [("chatcmpl-2", None), (None, "down")]
    assert "preferred_over chatcmpl-2" in temper("feedback", "list", url=url).stdout


def test_each_kind_of_answer_is_named_as_the_api_does(url: str) -> None:
    for name, field in {"resp_1": "response_id", "msg-1": "message_id", "chatcmpl-1": "completion_id"}.items():
        made = json.loads(give(url, name, "--score", "0.5", "--label", "fine", "--json").stdout)
        assert (made[field], made["score"], made["label"]) == (name, 0.5, "fine")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("chatcmpl-1",), "say something of the answer"),
        (("chatcmpl-1", "--up", "--down"), "contradict each other"),
        (("chatcmpl-1", "--score", "2"), "--score"),
    ],
)
def test_refusals_say_nothing(url: str, words: tuple[str, ...], says: str) -> None:
    result = give(url, *words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert json.loads(temper("feedback", "list", "--json", url=url).stdout) == []


def test_what_a_kind_misses_is_told(url: str) -> None:
    def refused(kind: str) -> str:
        result = temper("feedback", "export", kind, "out.jsonl", url=url)
        assert result.exit_code == 2
        return result.stderr

    assert "`temper feedback give" in refused("sft")
    give(url, "chatcmpl-1", "--up")
    assert "give --correct or --over" in refused("dpo")
    assert "give --up and --down" in refused("kto")
    give(url, "chatcmpl-9", "--down")
    give(url, "chatcmpl-4", "--up")
    assert "2 answers are not kept" in refused("kto")
    assert not Path("out.jsonl").exists()
    assert "2 answers are left out" in temper("feedback", "export", "sft", "out.jsonl", url=url).stdout
