"""What commands print, and how they end: in processes of their own, for Ctrl-C goes to a process."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import typer
from rich.markup import escape

from cli.output import CleanConsole, Output, guarded
from services.common.errors import InvalidRequest, TemperError, Unavailable
from tests.unit.cli.runner import temper

_COMMAND = """
import os, signal, time, typer
from cli.output import CliError, Output, guarded

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background

def command() -> None:
    with guarded(Output(as_json=False)):
        {body}
    print("after")

typer.run(command)
"""
_INTERRUPTED = "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "No such option: --nonsense"),
        (["nonsense"], "No such command 'nonsense'."),
        (["train", "nonsense"], "No such command 'nonsense'."),
        (["chat", "--temperature", "warm", "Hello"], "Invalid value for '--temperature'"),
        (["adapters", "show"], "Missing argument"),
        (["demo", "--loop", "--rounds", "2"], "--loop has no rounds"),
    ],
)
def test_an_error_of_the_command_line_is_a_document_too(arguments: list[str], said: str) -> None:
    plain, told = temper(*arguments), temper(*arguments, "--json")
    assert (plain.exit_code, told.exit_code) == (2, 2)
    assert plain.stdout == ""
    assert said in json.loads(told.stdout)["error"]["message"]
    assert told.stderr == plain.stderr


def run(body: str) -> subprocess.CompletedProcess[str]:
    lines = body.replace("\n", "\n        ")
    return subprocess.run(
        [sys.executable, "-c", _COMMAND.format(body=lines)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "body",
    [
        _INTERRUPTED,
        # A library that makes an error of its own of whatever stops it.
        f"try:\n    {_INTERRUPTED}\nexcept KeyboardInterrupt:\n    raise ValueError('half built')",
    ],
)
def test_interrupts(body: str) -> None:
    ended = run(body)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_errors() -> None:
    known, bug = run("raise CliError('no such job')"), run("raise ValueError('bug')")
    assert (known.returncode, known.stderr) == (1, "error: no such job\n")
    assert bug.returncode == 1
    assert "ValueError: bug" in bug.stderr
    assert "interrupted" not in bug.stderr


def test_nothing_wrong() -> None:
    ended = run("pass")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "after\n", "")


def test_an_interrupt_that_was_lost_is_sent_again() -> None:
    """Where Python cannot raise it, or a library makes something else of it."""
    for lost in ("except KeyboardInterrupt: pass", "except BaseException: print('something else')"):
        ended = run(f"try: {_INTERRUPTED}\n{lost}\ntime.sleep(30)")
        assert ended.returncode == 130
        assert ended.stderr == "interrupted\n"


def test_an_orderly_end_is_not_disturbed() -> None:
    body = "from cli.interrupts import undisturbed\ntry: os.kill(os.getpid(), signal.SIGINT)\nfinally:\n"
    body += "    with undisturbed(): time.sleep(1.5); os.kill(os.getpid(), signal.SIGINT); print('in order')"
    ended = run(body)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "in order\n", "interrupted\n")


def test_what_a_command_does_at_its_end_is_not_told_again() -> None:
    """Stopping a process and removing what it wrote may take longer than the pause before the next telling."""
    ended = run(f"try: {_INTERRUPTED}\nfinally: time.sleep(2.5); print('in order')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "in order\n", "interrupted\n")
    again = "import threading; threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()"
    ended = run(f"{again}\ntry: {_INTERRUPTED.partition(';')[0]}\nfinally: time.sleep(2.5); print('in order')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")  # the user's own second one


HOSTILE = "a\tb :x: \x1b]52;c;aGk=\x07 \x9b2J \u202egnp.exe [red]é"


def test_text_from_elsewhere_does_not_command_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    output = Output(as_json=False)
    output.out = CleanConsole(file=shown, force_terminal=True, width=200)
    output.text(HOSTILE, style="red")
    output.out.print(escape(HOSTILE))
    output.table(None, ["NAME"], [[HOSTILE]], empty="")
    assert ":x:" in shown.getvalue()
    assert "[red]é" in shown.getvalue()
    assert "\x1b[31m" in shown.getvalue()  # a style of ours
    assert not [text for text in ("\x1b]", "\x9b", "\u202e") if text in shown.getvalue()]


def test_where_nobody_looks_text_is_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).text(HOSTILE)
    assert capsys.readouterr().out == HOSTILE


@pytest.mark.parametrize(("error", "code"), [(InvalidRequest("wrong"), 2), (Unavailable("away"), 1)])
def test_an_error_of_tempers_is_one_line(capsys: pytest.CaptureFixture[str], error: TemperError, code: int) -> None:
    with pytest.raises(typer.Exit) as exit_, guarded(Output(as_json=True)):
        raise error
    assert exit_.value.exit_code == code
    said = capsys.readouterr()
    assert json.loads(said.out) == {"error": {"message": error.message}}
    assert said.err == f"error: {error.message}\n"


@pytest.mark.parametrize("rows", [[["job-1"]], []])
def test_what_a_list_could_not_read_is_told(capsys: pytest.CaptureFixture[str], rows: list[list[str]]) -> None:
    answer = {"data": rows, "unreadable": [{"id": "job-2", "code": "newer_schema", "message": "job-2 has [schema] 9"}]}
    Output(as_json=False).table(answer, ["job"], rows, empty="No jobs yet")
    said = capsys.readouterr()
    assert ("job-1" in said.out) == bool(rows)
    assert "No jobs yet" not in said.out
    assert "not shown: job-2 has [schema] 9" in said.err
