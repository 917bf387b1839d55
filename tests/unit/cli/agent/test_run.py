"""`temper run` against a chat server that answers by a script, with real tools."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli.agent.tools import MOST_CHARACTERS
from cli.job_files import data
from cli.local.ports import claim_ports
from services.common.security.sandbox.commands import available
from services.common.security.sandbox.shut_in import SandboxUnavailable
from tests.missing import any_sandbox
from tests.stack import ROOT, clean_environment
from tests.unit.cli.agent.scripted import calls, model, refuses, says
from tests.unit.cli.runner import temper
from tests.unit.cli.server import Reply

MCP_SERVER = """
import sys
from mcp.server import MCPServer
server = MCPServer("numbers")
@server.tool(description="Add two numbers.")
def add(a: int, b: int) -> str:
    if a < 0:
        raise ValueError("too small")
    return str(a + b)
@server.tool(description="Another reader.")
def read(path: str) -> str:
    return "theirs"
server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}))
"""
BAD_MCP_SERVER = """
import os
from mcp.server import MCPServer
server = MCPServer("bad")
@server.tool(name="all/of it")
def all_of_it() -> str:
    return "x" * 5_000_000
@server.tool()
def die() -> str:
    os._exit(3)
server.run("stdio")
"""


@pytest.fixture(scope="module")
def sandboxed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands can be shut in here."""
    with any_sandbox():
        available(tmp_path_factory.mktemp("tried").resolve())


@pytest.fixture
def workspace(tmp_path: Path, sandboxed: None) -> Path:
    """One that commands can run in."""
    place = (tmp_path / "workspace").resolve()
    place.mkdir()
    return place


def run(url: str, workspace: Path, *more: str, code: int = 0) -> dict[str, Any]:
    result = temper("run", "--prompt", "Do it.", "--json", "--workspace", str(workspace), *more, url=url)
    assert result.exit_code == code, result.output + result.stderr
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def wait_for_port(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 1).close()
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on {port}")


def wait_for_file(file: Path) -> None:
    for _ in range(600):
        if file.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"there is no {file}")


def test_tools_are_called_until_the_model_calls_nothing(workspace: Path) -> None:
    script = (
        calls(("write", {"path": "a/one.txt", "content": "first\nsecond\n"}), ("list", {})),
        calls(("read", {"path": "a/one.txt", "first_line": 2}), ("shell", {"command": "cat a/one.txt; exit 3"})),
        calls(("python", {"code": "import os; print(sorted(os.environ)); open('two', 'w').write('2')"})),
        says("Done."),
    )
    with model(*script) as (url, bodies):
        report = run(url, workspace, "--temperature", "0.5", "--adapter", "polite@1")
    assert (report["answer"], report["finish"], report["steps"]) == ("Done.", "answered", 4)
    assert [call["result"] for call in report["tool_calls"][:4]] == [
        "wrote 13 characters",
        "a/",
        "second\n",
        "first\nsecond\n[exit status 3]",
    ]
    assert report["tool_calls"][4]["result"] == "['HOME', 'LANG', 'PATH', 'TMPDIR']"
    assert (workspace / "two").read_text() == "2"
    assert report["usage"] == {"prompt_tokens": 360, "cached_tokens": 28, "completion_tokens": 40}
    # Every request begins with the one before, in the same session: the prefix cache works.
    assert len({body["session_id"] for body in bodies}) == 1
    for before, after in pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]
    assert (bodies[0]["temperature"], bodies[0]["adapter"]) == (0.5, "polite@1")
    assert bodies[-1]["messages"][-1]["role"] == "tool"


def test_what_a_call_gets_wrong_is_told_to_the_model(workspace: Path) -> None:
    script = calls(
        ("fly", {}),
        ("read", "{"),
        ("read", {"path": "../secret"}),
        ("read", {"path": "/etc/passwd"}),
        ("write", {"path": "x", "content": 3}),
        ("list", "[]"),
        ("shell", {"command": f"head -c {MOST_CHARACTERS * 2} /dev/zero | tr '\\0' x"}),
        ("read", {"path": "x", "lines": "all"}),
        ("read", "[" * 100_000),
        ("read", {"path": "\ud800"}),
        ("write", {"path": "x", "content": "\ud800"}),
        ("list", {}),
    )
    (workspace.parent / "secret").write_text("sk-secret")
    os.close(os.open(os.fsencode(workspace) + b"/\xff", os.O_CREAT))
    with model(script, says("Sorry.")) as (url, _):
        results = [call["result"] for call in run(url, workspace)["tool_calls"]]
    assert results[0] == "there is no tool 'fly': there are python, shell, read, write, list"
    assert results[1].startswith("the arguments are not JSON")
    assert results[2] == "error: ../secret: is outside of the workspace"
    assert results[3].startswith("error: /etc/passwd is outside of the workspace")
    assert results[4] == "error: content: must be a text"
    assert results[5] == "the arguments are not an object"
    assert f"{MOST_CHARACTERS} characters are left out here" in results[6]
    assert len(results[6]) < MOST_CHARACTERS + 100
    assert results[7] == "error: lines: must be an integer of at least 1"
    assert results[8].startswith("the arguments are not JSON")
    assert [result.split(":")[:2] for result in results[9:11]] == [["error", " UnicodeEncodeError"]] * 2
    assert results[11] == "?"  # a name that is no text


def test_a_mode_decides_what_runs_unasked(workspace: Path) -> None:
    script = calls(("read", {"path": "f"}), ("shell", {"command": "rm f"}))
    (workspace / "f").write_text("kept")
    with model(script, says("")) as (url, _):
        read, shell = run(url, workspace, "--approve", "ask")["tool_calls"]
    assert read["result"] == "kept"
    assert (shell["failed"], shell["result"]) == (True, "refused: the user did not allow this call")
    assert (workspace / "f").exists()


def test_ends_have_codes(workspace: Path) -> None:
    endless = [calls(("list", {}))] * 3
    with model(*endless) as (url, _):
        assert run(url, workspace, "--max-steps", "2", code=4)["finish"] == "steps"
    with model(says("cut", finish="length")) as (url, bodies):
        assert run(url, workspace, "--no-tools")["finish"] == "length"
        assert "tools" not in bodies[0]
    with model(says("x")) as (url, _):
        assert run(url, workspace, "--check", "test -e missing", code=1)["passed"] is False
    with model(refuses("nonsense")) as (url, _):
        assert run(url, workspace, "--no-tools", code=1)["error"]["code"] == "nonsense"
    with model() as (url, _):
        assert "there is no tool 'fly'" in run(url, workspace, "--tool", "fly", code=2)["error"]["message"]


def test_without_a_sandbox_tools_are_refused_unless_they_are_asked_for(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise SandboxUnavailable("no sandbox works here: none")

    monkeypatch.setattr("cli.agent.setting_up.available", none)
    with model() as (url, _):
        message = run(url, workspace, code=2)["error"]["message"]
        assert "no sandbox works here" in message
        assert "--unsafe-tools" in message
    with model(calls(("shell", {"command": "echo hello"})), says("")) as (url, _):
        (call,) = run(url, workspace, "--unsafe-tools")["tool_calls"]
        assert call["result"] == "refused: the user did not allow this call"  # it reaches outside: --approve all
    with model(calls(("shell", {"command": "echo hello; sleep 9"})), says("")) as (url, _):
        (call,) = run(url, workspace, "--unsafe-tools", "--approve", "all", "--tool-seconds", "0.5")["tool_calls"]
        assert call["result"] == "hello\n[stopped: it ran for more than 0.5 s]"
    with model(says("Hello.")) as (url, _):
        assert run(url, workspace, "--no-tools")["answer"] == "Hello."


def test_a_trace_is_what_grpo_learns_from(workspace: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    attempts = (
        calls(("write", {"path": "f", "content": "1"}), prompt=[1], adapter="polite@2"),
        says("A", prompt=[1, 2]),
        says("B", prompt=[1], finish="length"),
    )
    with model(*attempts) as (url, bodies):
        more = ("--samples", "2", "--check", "test -e f", "--seed", "7", "--trace", str(trace))
        assert run(url, workspace, *more, code=1)["passed"] is False
    assert [body["seed"] for body in bodies] == [7, 7, 8]
    assert not (workspace / "f").exists()
    groups = data("grpo", trace)["groups"]
    assert [group["prompt_token_ids"] for group in groups] == [[1], [1, 2]]
    first, second = groups[0]["completions"]
    assert (first["adapter"], first["reward"], first["truncated"]) == ("polite@2", 1.0, False)
    assert (second["adapter"], second["reward"], second["truncated"]) == ("base", 0.0, True)
    assert len(first["token_ids"]) == len(first["logprobs"]) > 1


def test_a_trace_keeps_the_attempts_that_were_over_when_the_server_went_away(workspace: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with model(says("A", prompt=[1]), refuses("engine_unavailable", 503)) as (url, _):
        run(url, workspace, "--no-tools", "--samples", "2", "--trace", str(trace), code=3)
    assert [len(group["completions"]) for group in data("grpo", trace)["groups"]] == [1]


def test_an_interrupted_attempt_is_no_failure_of_the_model(workspace: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    script = (says("A", prompt=[1]), calls(("shell", {"command": "touch begun; sleep 60"}), prompt=[1]))
    words = ("run", "--prompt", "Do it.", "--workspace", str(workspace), "--check", "! touch checked", "--samples", "3")
    with model(*script) as (url, _):
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", *words, "--json", "--trace", str(trace), "--url", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=clean_environment(),
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # also where tests run in the background
        )
        wait_for_file(workspace / "begun")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(said)
    assert (report["finish"], report["passed"]) == ("interrupted", None)
    assert not (workspace / "checked").exists()  # it was put back, and nothing was checked again
    assert [len(group["completions"]) for group in data("grpo", trace)["groups"]] == [1]


def test_a_conversation_near_the_context_is_compacted_and_goes_on(workspace: Path) -> None:
    long = calls(("shell", {"command": "head -c 3000 /dev/zero | tr '\\0' x"}))
    last = calls(("list", {}), tokens=3500)
    too_long = refuses("context_length_exceeded")
    with model(long, long, long, last, says("Done."), context=4096) as (url, bodies):
        assert run(url, workspace)["answer"] == "Done."
    results = [turn["content"] for turn in bodies[-1]["messages"] if turn["role"] == "tool"]
    assert ["shortened" in result for result in results] == [True, True, False, False]
    with model(long, long, long, too_long, says("Much x."), says("Done.")) as (url, bodies):
        assert run(url, workspace)["answer"] == "Done."
    assert len(json.dumps(bodies[-1])) < len(json.dumps(bodies[-3]))
    assert "Summary of our work so far:\nMuch x." in bodies[-1]["messages"][1]["content"]
    with model(too_long, too_long) as (url, _):
        assert run(url, workspace, "--no-tools", code=1)["error"]["code"] == "context_length_exceeded"
    # What was written is in the calls, not in their results; a summary that is refused stops nothing.
    writes = [calls(("write", {"path": f"f{number}", "content": "x" * 4000}), tokens=3500) for number in range(3)]
    with model(*writes, too_long, says("Done.")) as (url, bodies):
        assert run(url, workspace)["answer"] == "Done."
    roles = [turn["role"] for turn in bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert bodies[-1]["messages"][1]["content"].endswith("Do it.")


def test_tools_of_mcp_servers_are_offered_and_called(workspace: Path, tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(MCP_SERVER)
    place = f"numbers={sys.executable} {server} stdio"
    script = calls(("add", {"a": 2, "b": 3}), ("numbers_read", {"path": "x"}), ("add", {"a": -1, "b": 0}))
    with model(script, says("5")) as (url, bodies):
        results = [call["result"] for call in run(url, workspace, "--mcp", place, "--approve", "all")["tool_calls"]]
    assert results[:2] == ["5", "theirs"]
    assert results[2] == "error: Error executing tool add"
    names = [tool["function"]["name"] for tool in bodies[0]["tools"]]
    assert names == ["python", "shell", "read", "write", "list", "add", "numbers_read"]
    (claimed,) = claim_ports(1)
    with subprocess.Popen([sys.executable, server, "streamable-http", str(claimed.number)], stderr=-3) as process:
        place = f"web=http://127.0.0.1:{claimed.number}/mcp"
        wait_for_port(claimed.number)
        with model(calls(("add", {"a": 20, "b": 3})), says("23")) as (url, _):
            (call,) = run(url, workspace, "--mcp", place, "--approve", "all", "--tool", "add")["tool_calls"]
        process.kill()
    assert call["result"] == "23"
    with model() as (url, _):
        message = run(url, workspace, "--mcp", "gone=http://127.0.0.1:9/mcp", code=2)["error"]["message"]
        assert message.startswith("MCP server gone (http://127.0.0.1:9/mcp): ")
        assert "NAME=URL" in run(url, workspace, "--mcp", "nothing", code=2)["error"]["message"]
        for place, reason in (
            ('quote="', "No closing quotation"),
            ("none=/nowhere/server", "No such file"),
            (f"noisy={sys.executable} -c 'import os; os.write(2, bytes([255]))'", "\ufffd"),
        ):
            message = run(url, workspace, "--mcp", place, code=2)["error"]["message"]
            assert message.startswith(f"MCP server {place.partition('=')[0]}")
            assert reason in message


def test_a_server_that_dies_or_says_too_much_ends_a_call_and_nothing_more(workspace: Path, tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(BAD_MCP_SERVER)
    script = calls(("all_of_it", {}), ("die", {}), ("die", {}))
    with model(script, says("Gone.")) as (url, bodies):
        report = run(url, workspace, "--mcp", f"bad={sys.executable} {server}", "--approve", "all")
    assert {tool["function"]["name"] for tool in bodies[0]["tools"]} >= {"all_of_it", "die"}
    results = [call["result"] for call in report["tool_calls"]]
    assert len(results[0]) < MOST_CHARACTERS + 100
    assert [result.startswith("error: ") for result in results] == [False, True, True]
    assert report["answer"] == "Gone."


def test_a_workspace_with_keys_of_a_temper_is_refused(workspace: Path) -> None:
    (workspace / ".temper").mkdir()
    (workspace / ".temper" / "secrets.json").write_text("{}")
    with model() as (url, _):
        assert "has the keys of a `temper up`" in run(url, workspace, code=2)["error"]["message"]


def test_a_server_without_token_ids_makes_no_trace(workspace: Path, tmp_path: Path) -> None:
    plain = Reply(
        'data: {"choices": [{"delta": {"content": "x"}}]}\n\ndata: [DONE]\n\n', content_type="text/event-stream"
    )
    with model(plain) as (url, _):
        message = run(url, workspace, "--no-tools", "--trace", str(tmp_path / "t"), code=1)["error"]["message"]
    assert "a trace needs a Temper" in message
