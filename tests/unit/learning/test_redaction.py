"""Rules of what a request log leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.learning.request_log.redaction import PARTS, Redaction


def record() -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "mail", "arguments": '{"to": "ann@x.org"}'}}
    return {
        "id": "chatcmpl-1",
        "user": "ann@x.org",
        "session": "s",
        "metadata": {"name": "Ann", "page": "help"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "call +49 30 1234567"}]}],
        "tools": [{"type": "function", "function": {"name": "mail", "description": "to bob@x.org"}}],
        "prompt": None,
        "sampling": {"stop": ["ann@x.org"]},
        "prompt_token_ids": [[1, 2]],
        "choices": [
            {
                "message": {"role": "assistant", "content": None, "tool_calls": [call]},
                "token_ids": [3],
                "logprobs": [0.1],
            }
        ],
    }


def rules(tmp_path: Path, text: str) -> Redaction:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    return Redaction.read(file)


def test_patterns_are_found_everywhere(tmp_path: Path) -> None:
    found = record()
    rules(tmp_path, "[patterns]\nemail = '[a-z]+@[a-z.]+'\nphone = '\\+[0-9 ]+'\n").apply(found)
    assert "x.org" not in str(found)
    assert "1234567" not in str(found)
    assert found["messages"][0]["content"][0]["text"] == "call [phone]"
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"to": "[email]"}'
    assert found["redacted"] == ["email", "phone"]
    assert found["prompt_token_ids"] is found["choices"][0]["token_ids"] is found["choices"][0]["logprobs"] is None


def test_what_has_no_pattern_stays_as_it_is(tmp_path: Path) -> None:
    found = record()
    rules(tmp_path, "[patterns]\nnumber = '[0-9]{30}'\n").apply(found)
    assert found == record()


@pytest.mark.parametrize("name", [*PARTS, "metadata.name"])
def test_each_part_can_be_left_out(tmp_path: Path, name: str) -> None:
    found = record()
    rules(tmp_path, f"leave_out = ['{name}']\n").apply(found)
    assert found != record() or record().get(name, 0) is None
    if name == "metadata.name":
        assert found["metadata"] == {"page": "help"}
    elif name == "answers":
        assert found["choices"][0]["message"] is None
    elif name in ("token_ids", "logprobs"):
        assert found["choices"][0][name] is None
        assert (found["prompt_token_ids"] is None) == (name == "token_ids")
    else:
        assert found[name] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leave_out = ['everything']", "'everything' is no part of a logged request"),
        ("leave_out = 'user'", "leave_out"),
        ("[patterns]\nx = '('", "patterns.x is no expression of RE2"),
        ("pattern = 1", "pattern"),
        ("[", "is not TOML"),
    ],
)
def test_faulty_rules_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"rules\.toml") as raised:
        rules(tmp_path, text)
    assert message in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Redaction.read(tmp_path / "none.toml")
