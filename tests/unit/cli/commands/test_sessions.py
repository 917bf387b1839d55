"""What `temper sessions` sends, prints, writes, and exits with; and which session `temper chat` is of."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.commands import chat
from cli.http.client import Client
from cli.output import Output
from cli.settings import CliSettings
from tests.unit.cli.commands.test_commands import chunks
from tests.unit.cli.runner import routes, temper
from tests.unit.cli.server import Reply, Seen, serving

SESSION: dict[str, Any] = {
    "id": "support/42",
    "object": "session",
    "tokens": 1234,
    "requests": 3,
    "adapter": None,
    "created_at": 1,
    "used_at": 0,
    "expires_at": 1_800_000_000,
    "saved": True,
    "bytes": {"device": 50_000_000, "host": 0, "disk": 100_000_000},
    "engine": "engine-0a1b2c3d",
}
ROUTE = "/v1/sessions/support%2F42"


def answer(seen: Seen) -> Reply:
    """A gateway with one session."""
    path, _, _ = seen.path.partition("?")
    one = {**SESSION, "used_at": int(time.time()) - 7300}
    return {
        ("GET", "/v1/sessions"): Reply({"object": "list", "data": [one], "has_more": True}),
        ("GET", ROUTE): Reply(one),
        ("POST", f"{ROUTE}/save"): Reply(one),
        ("GET", f"{ROUTE}/export"): Reply(b"history" * 1000, content_type="application/octet-stream"),
        ("PUT", f"{ROUTE}/import"): Reply(one),
        ("DELETE", ROUTE): Reply({"id": "support/42", "object": "session", "deleted": True}),
    }.get((seen.method, path), Reply({"error": {"message": "no such session: 'x'", "code": "not_found"}}, 404))


def test_list_and_show() -> None:
    with serving(answer) as (url, requests):
        listed = temper("sessions", "list", "--limit", "1", url=url)
        shown = temper("sessions", "show", "support/42", url=url)
        as_json = temper("sessions", "list", "--json", url=url)
    assert requests[0].path == "/v1/sessions?limit=1"
    assert "support/42" in listed.stdout
    assert "device 50.0 MB, disk 100.0 MB" in listed.stdout
    assert "2 h ago" in listed.stdout
    assert "there are more than 1: --limit" in listed.stderr
    for words in ("1234 tokens", "requests  3", "base model", "engine-0a1b2c3d", "saved     yes"):
        assert words in shown.stdout
    assert json.loads(as_json.stdout)["data"][0]["tokens"] == 1234


def test_save_and_delete() -> None:
    with serving(answer) as (url, requests):
        saved = temper("sessions", "save", "support/42", url=url)
        deleted = temper("sessions", "delete", "support/42", "--json", url=url)
        missing = temper("sessions", "delete", "x", url=url)
    assert [(seen.method, seen.path) for seen in requests[:2]] == [("POST", f"{ROUTE}/save"), ("DELETE", ROUTE)]
    assert "saved support/42: 1234 tokens" in saved.stdout
    assert json.loads(deleted.stdout)["deleted"] is True
    assert (missing.exit_code, saved.exit_code, deleted.exit_code) == (1, 0, 0)
    assert "no such session" in missing.stderr


def test_export_and_import(tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    with serving(answer) as (url, requests):
        exported = temper("sessions", "export", "support/42", str(file), url=url)
        assert file.read_bytes() == b"history" * 1000
        imported = temper("sessions", "import", str(file), "support/42", "--key-id", "k-1", url=url)
    assert (exported.exit_code, imported.exit_code) == (0, 0), imported.output
    assert "7.0 kB" in exported.stdout
    sent = requests[1]
    assert (sent.method, sent.path) == ("PUT", f"{ROUTE}/import?key_id=k-1")
    assert sent.body == file.read_bytes()
    assert sent.headers["content-type"] == "application/octet-stream"
    assert "transfer-encoding" not in sent.headers, "its length is told: too large a file is refused at once"
    assert "imported support/42: 1234 tokens" in imported.stdout
    assert not list(tmp_path.glob("*.part"))


def test_what_goes_wrong_with_files(tmp_path: Path) -> None:
    with serving(answer) as (url, requests):
        for name in ("none", "."):
            result = temper("sessions", "import", str(tmp_path / name), "s", url=url)
            assert result.exit_code == 2
        assert not requests
        refused = temper("sessions", "export", "x", str(tmp_path / "x"), url=url)
    assert refused.exit_code == 1
    assert not list(tmp_path.iterdir()), "nothing is left of it"


def test_the_bytes_that_move_are_told(tmp_path: Path) -> None:
    file, moved = tmp_path / "f", []
    file.write_bytes(bytes(3 * 2**20 + 5))
    with serving(answer) as (url, _), Client(url, CliSettings()) as client:
        client.send_file("PUT", f"{ROUTE}/import", file, on_block=moved.append)
        assert moved == [2**20] * 3 + [5]
        moved.clear()
        client.download(f"{ROUTE}/export", file, on_block=moved.append)
    assert sum(moved) == 7000


def test_a_conversation_is_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hi", "and then?", "/reset", "hello", "/quit"])
    monkeypatch.setattr(Console, "input", lambda *_, **__: next(lines))
    replies = routes(POST_v1_chat_completions=chunks("yes"))
    with serving(replies) as (url, requests), Client(url, CliSettings()) as client:
        chat._converse(client, Output(as_json=False), {"model": "m"}, [])
    sessions = [seen.json["session_id"] for seen in requests]
    assert sessions[0] == sessions[1] != sessions[2], "/reset begins another"
    assert all(session.startswith("chat-") for session in sessions)


def test_one_message_is_of_the_session_that_is_named() -> None:
    replies = routes(GET_v1_models=Reply({"data": [{"id": "m"}]}), POST_v1_chat_completions=chunks("yes"))
    with serving(replies) as (url, requests):
        temper("chat", "hi", url=url)
        temper("chat", "hi", "--session", "mine", url=url)
    assert "session_id" not in requests[1].json
    assert requests[3].json["session_id"] == "mine"
