"""`temper agent`: commands of the conversation, what is asked, and what Ctrl-C stops, on a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import ROOT, clean_environment
from tests.unit.cli.agent.scripted import calls, model, refuses, says


class Terminal:
    """`temper agent` on a terminal of its own."""

    def __init__(self, main: int, process: subprocess.Popen[bytes]) -> None:
        self._main = main
        self.process = process
        self.text = ""

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Reads until a text comes, and forgets what is before its end."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            readable, _, _ = select.select([self._main], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{text!r} did not come: {self.text}"
            with contextlib.suppress(OSError):
                self.text += os.read(self._main, 65536).decode(errors="replace")
        self.text = self.text.partition(text)[2]

    def say(self, line: str) -> None:
        os.write(self._main, f"{line}\n".encode())

    def interrupt(self) -> None:
        os.write(self._main, b"\x03")


@contextlib.contextmanager
def agent(url: str, workspace: Path, *more: str) -> Iterator[Terminal]:
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "agent", "--url", url, "--workspace", str(workspace), *more],
        cwd=ROOT,
        stdin=other,
        stdout=other,
        stderr=other,
        env=clean_environment({"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}),
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(other)
    try:
        yield Terminal(main, process)
    finally:
        process.kill()
        process.wait()
        os.close(main)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_conversation_with_all_commands(tmp_path: Path) -> None:
    workspace = (tmp_path / "workspace").resolve()
    workspace.mkdir()
    (workspace / "kept").write_text("before")
    saved, trace = tmp_path / "saved.json", tmp_path / "trace.jsonl"
    script = (
        calls(("shell", {"command": "echo after > kept; echo more > new"})),
        says("Changed."),
        calls(("write", {"path": "refused", "content": ""})),
        says("Not written."),
        calls(("shell", {"command": "echo begun; sleep 60"})),
        refuses("engine_unavailable", 503),
        says("Still here."),
    )
    with model(*script) as (url, bodies), agent(url, workspace) as terminal:
        terminal.wait_for("/help lists commands")
        terminal.say("/nothing")
        terminal.wait_for("there is no /nothing")
        terminal.say("Change it.")
        terminal.wait_for("allow?")
        terminal.say("a")
        terminal.wait_for("base model")
        assert (workspace / "kept").read_text() == "after\n"
        terminal.say("/undo")
        terminal.wait_for("taken back, and the files")
        assert (workspace / "kept").read_text() == "before"
        assert not (workspace / "new").exists()
        terminal.say("/tools off list")
        terminal.wait_for("off list")
        terminal.say("/model other")
        terminal.wait_for("model: other")
        terminal.say("/adapter polite@2")
        terminal.wait_for("adapter: polite@2")
        terminal.say(f"/trace {trace}")
        terminal.wait_for("tracing to")
        terminal.say("Write it.")
        terminal.wait_for("allow?")
        terminal.say("n")
        terminal.wait_for("Not written.")
        terminal.wait_for("base model")
        terminal.say("/trace reward 1")
        terminal.wait_for("with reward 1")
        terminal.say("/trace off")
        terminal.wait_for("no trace")
        terminal.say("Wait.")  # the shell is allowed always
        terminal.wait_for("→ shell")
        time.sleep(0.5)
        terminal.interrupt()
        terminal.wait_for("interrupted")
        terminal.say("Is somebody there?")
        terminal.wait_for("error: refused: engine_unavailable")
        terminal.say(f"/save {saved}")
        terminal.wait_for("saved to")
        terminal.say("And now?")
        terminal.wait_for("Still here.")
        terminal.say(f"/load {saved}")
        terminal.wait_for("messages; session agent-")
        terminal.say("/undo")
        terminal.wait_for("there is no turn to undo")
        terminal.say("/exit")
        assert terminal.process.wait(30) == 0
    assert [len(body["tools"]) for body in bodies] == [5, 5, 4, 4, 4, 4, 4]
    assert [body["model"] for body in bodies[1:3]] == ["qwen3.5", "other"]
    assert (bodies[2]["adapter"], len(bodies[2]["messages"])) == ("polite@2", 2)  # the first turn is taken back
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [one["reward"] for row in rows for one in row["completions"]] == [1.0, 1.0]
    roles = [turn["role"] for turn in bodies[-1]["messages"]]
    assert roles == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert "interrupted" in bodies[-1]["messages"][7]["content"]
    assert not (workspace / "refused").exists()


def test_what_was_typed_before_a_question_does_not_answer_it(tmp_path: Path) -> None:
    workspace = (tmp_path / "workspace").resolve()
    workspace.mkdir()
    script = (
        calls(("shell", {"command": "touch begun; sleep 3"})),
        calls(("write", {"path": "refused", "content": ""})),
        says("Not \x1b[8m written."),
    )
    with model(*script) as (url, _), agent(url, workspace) as terminal:
        terminal.wait_for("/help lists commands")
        terminal.say("Do it.")
        terminal.wait_for("allow?")
        terminal.say("y")
        while not (workspace / "begun").exists():
            time.sleep(0.05)
        terminal.say("y")
        terminal.wait_for("allow?")
        time.sleep(1)
        assert not (workspace / "refused").exists()
        terminal.say("n")
        terminal.wait_for("Not \u241b[8m written.")  # nor does an answer command the terminal
        terminal.say("/exit")
        assert terminal.process.wait(30) == 0


@pytest.mark.parametrize(
    "text",
    ["{", '{"format": 2}', '{"format": 1, "turns": 5}', '{"format": 1, "model": "m", "turns": [], "nonsense": 3}'],
)
def test_only_what_was_saved_is_loaded(tmp_path: Path, text: str) -> None:
    from cli.agent.conversation import Conversation
    from cli.output import CliError

    (tmp_path / "f").write_text(text)
    with pytest.raises(CliError, match=r"is not JSON|is not what /save writes"):
        Conversation.load(tmp_path / "f")
