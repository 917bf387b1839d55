"""Processes that compile end with the process that they compile for, and when it ends them."""

from __future__ import annotations

import subprocess
import sys

from tests.stack import ROOT

SCRIPT = """
import subprocess
import sys

from services.engine.executors.compiler_pool import CompilerPool


def begin(name):
    pool = CompilerPool(1)
    pool.submit(subprocess.run, ["sh", "-c", f"echo {name} begun; sleep 1000; echo {name} done"])
    return pool

first, second = begin("first"), begin("second")
sys.stdin.readline()
first.end()
second.end()
"""


def test_compiles_in_flight_end_with_the_process_that_is_killed() -> None:
    with _begun() as process:
        process.kill()
        assert _rest(process) == ""


def test_compiles_in_flight_do_not_hold_a_process_that_ends_them() -> None:
    with _begun() as process:
        _say(process, "\n")
        assert _rest(process) == ""
        assert process.wait() == 0


def _begun() -> subprocess.Popen[str]:
    """A process with two pools, each at something that takes a quarter of an hour."""
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"first begun\n", "second begun\n"}
    return process


def _say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def _rest(process: subprocess.Popen[str]) -> str:
    """What is written until nobody is left who could: all processes that it began have its standard output."""
    assert process.stdout is not None
    return process.stdout.read()
