"""Recordings, what is chosen for them, and the spool that they wait in."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.text.output_parser import ChatParser
from services.learning.request_log.index import Entry
from services.learning.request_log.recording import RecordedChoice, chosen
from services.learning.request_log.spool import PART_BYTES, Spool

CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def test_a_message_with_reasoning_and_calls_is_the_clients() -> None:
    parser = ChatParser(thinking=True, tools=({"type": "function", "function": {"name": "add"}},))
    choice = RecordedChoice("chatcmpl-1")
    for piece in ("hm</think>\n\nI add.", CALL, CALL):
        choice.deltas += parser.feed(piece)
    choice.deltas += parser.finish(complete=True)
    message = choice.message()
    assert (message["role"], message["reasoning_content"], message["content"].strip()) == ("assistant", "hm", "I add.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "add"]
    assert {call["function"]["arguments"] for call in message["tool_calls"]} <= {'{"a": 1}', '{"a": "1"}'}
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@given(st.lists(st.text(), min_size=1, max_size=50), st.floats(0, 1))
def test_a_share_is_always_the_same_names(names: list[str], share: float) -> None:
    first = [chosen(name, share) for name in names]
    assert first == [chosen(name, share) for name in names]
    assert all(more or not less for less, more in zip(first, [chosen(name, 1.0) for name in names], strict=True))
    assert not any(chosen(name, 0.0) for name in names)


def test_a_share_is_that_share() -> None:
    assert 900 < sum(chosen(f"session-{number}", 0.1) for number in range(10_000)) < 1100


def test_the_spool_hands_on_what_is_complete(tmp_path: Path) -> None:
    spool, other = Spool(tmp_path / "spool", 2**20), Spool(tmp_path / "spool", 2**20)
    entry = Entry("a", 1.5, "key", "ann", None, ("resp_1",))
    spool.append([(entry, b"{}"), (Entry("b", 1.6, ""), b"[]")])
    with other.next() as found:
        assert found is None, "it is still being written"
    spool.complete(older_than=3600)
    with other.next() as found:
        assert found is None
    spool.complete()
    with pytest.raises(ZeroDivisionError), other.next() as found:
        raise ZeroDivisionError
    with spool.next() as found:
        assert found is not None
        assert found.part.startswith("19700101/")
        assert list(found.requests) == [(entry, b"{}"), (Entry("b", 1.6, ""), b"[]")]
        with other.next() as second:
            assert second is None, "one hands it on"
    with other.next() as found:
        assert found is None
    assert spool.has_room()


def test_a_reader_between_a_part_and_its_lock_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds a file that nobody has locked, with nothing in it, and removes it."""
    spool, other = Spool(tmp_path / "spool", 2**20), Spool(tmp_path / "spool", 2**20)
    lock, came = fcntl.flock, []

    def flock(handle: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not came:
            came.append(True)
            with other.next() as found:
                assert found is not None
                assert not found.requests
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    spool.append([(Entry("a", 1.0, ""), b"{}")])
    spool.complete()
    with other.next() as found:
        assert came
        assert found is not None
        assert [entry.id for entry, _ in found.requests] == ["a"]


def test_a_large_part_is_complete(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", PART_BYTES)
    spool.append([(Entry("a", 1.0, ""), b"small")])
    assert not spool.complete(older_than=3600)
    spool.append([(Entry("b", 1.0, ""), b"x" * PART_BYTES)])
    assert not spool.has_room()
    assert spool.complete(older_than=3600)
    with spool.next() as found:
        assert found is not None


def test_a_spool_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be used"):
        Spool(tmp_path / "file" / "spool", 1)
    if os.getuid() == 0:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", 12345, -1)
        with pytest.raises(InvalidRequest, match="another user"):
            Spool(tmp_path / "theirs", 1)
