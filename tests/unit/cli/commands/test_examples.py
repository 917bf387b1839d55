"""Each command's help has an example, and each example is a command line that is understood."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer

from cli.commands.operations.examples import EXAMPLES, leaves
from cli.main import app

ROOT = typer.main.get_command(app)


def test_every_command_has_an_example_and_no_example_is_of_no_command() -> None:
    assert {name for name, _ in leaves(app)} == set(EXAMPLES)


@pytest.mark.parametrize("example", [example for examples in EXAMPLES.values() for example in examples])
def test_an_example_is_understood(example: str) -> None:
    words = shlex.split(example)
    command: Any = ROOT
    context: Any = typer.Context(command)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("temper", words, parent=context)  # raises what a wrong command line gets


def test_help_shows_them() -> None:
    command: Any = ROOT
    assert "temper logs engine --follow" in (command.commands["logs"].epilog or "")
