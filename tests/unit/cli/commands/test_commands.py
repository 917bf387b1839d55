"""What the commands send, print, and exit with."""

from __future__ import annotations

import json

import pytest

from cli.local.ports import free_ports
from tests.unit.cli.runner import routes, temper
from tests.unit.cli.server import Reply, serving, sse


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
