"""Tools that a model may call: python, shell, read, write and list, in the workspace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cli.agent.approval import Effect
from cli.agent.workspace import OutsideWorkspace, Workspace
from services.common.security.sandbox.commands import CommandLimits, CommandOutcome, CommandSandbox
from services.common.security.sandbox.shut_in import NotStarted, run_watched

MOST_CHARACTERS = 16_000
"""Of a result that the model sees."""


class ToolFailed(Exception):
    """A call has no result; the model is told why."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    effect: Effect
    call: Callable[[Mapping[str, Any]], str]
    """Raises ToolFailed."""

    @property
    def definition(self) -> dict[str, Any]:
        """As the chat endpoint takes it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Runner(Protocol):
    """Runs commands in the workspace."""

    @property
    def python(self) -> str:
        """An interpreter."""

    def run(self, arguments: Sequence[str], limits: CommandLimits) -> CommandOutcome:
        """Runs one to its end or to a limit."""


@dataclass(frozen=True, slots=True)
class Unconfined:
    """Runs commands as the user, who has asked for it: with limits of time and output only."""

    workspace: Workspace
    python: str = field(default_factory=lambda: sys.executable)

    def run(self, arguments: Sequence[str], limits: CommandLimits) -> CommandOutcome:
        """See Runner."""
        environment = {"PATH": os.defpath, "HOME": str(self.workspace.root), "LANG": "C.UTF-8"}
        try:
            ended = run_watched(
                arguments,
                wall_seconds=limits.wall_seconds,
                output_bytes=limits.output_bytes,
                cwd=self.workspace.root,
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        except NotStarted as error:
            raise ToolFailed(str(error)) from error
        return CommandOutcome(ended.status if ended.status >= 0 else 128 - ended.status, ended.printed, ended.stopped)


def bounded(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text with its middle left out, and a note of it, where it is long."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters are left out here …]\n{text[-half:]}"


def built_in(workspace: Workspace, runner: Runner, limits: CommandLimits) -> list[Tool]:
    """The tools of every agent."""
    effect = Effect.WORKSPACE if isinstance(runner, CommandSandbox) else Effect.OUTSIDE

    def command(arguments: Sequence[str]) -> str:
        return _said(runner.run(arguments, limits))

    def python(arguments: Mapping[str, Any]) -> str:
        return command([runner.python, "-B", "-c", _text(arguments, "code")])

    def shell(arguments: Mapping[str, Any]) -> str:
        return command(["/bin/sh", "-c", _text(arguments, "command")])

    def read(arguments: Mapping[str, Any]) -> str:
        first = _number(arguments, "first_line", 1)
        most = None if arguments.get("lines") is None else _number(arguments, "lines", 1)
        return workspace.read(_text(arguments, "path"), first - 1, most)

    def write(arguments: Mapping[str, Any]) -> str:
        content = _text(arguments, "content")
        workspace.write(_text(arguments, "path"), content)
        return f"wrote {len(content)} characters"

    def names(arguments: Mapping[str, Any]) -> str:
        return "\n".join(workspace.list(str(arguments.get("path") or "."))) or "(empty)"

    text, number = {"type": "string"}, {"type": "integer", "minimum": 1}
    return [
        Tool("python", "Run a Python program and see what it prints.", _schema(["code"], code=text), effect, python),
        Tool("shell", "Run a shell command in the workspace.", _schema(["command"], command=text), effect, shell),
        Tool(
            "read",
            "Read a text file.",
            _schema(["path"], path=text, first_line=number, lines=number),
            Effect.READS,
            _in_workspace(read),
        ),
        Tool(
            "write",
            "Write a text file.",
            _schema(["path", "content"], path=text, content=text),
            Effect.WORKSPACE,
            _in_workspace(write),
        ),
        Tool("list", "List the files of a directory.", _schema([], path=text), Effect.READS, _in_workspace(names)),
    ]


def _schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _in_workspace(call: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    def checked(arguments: Mapping[str, Any]) -> str:
        try:
            return call(arguments)
        except (OutsideWorkspace, OSError) as error:
            raise ToolFailed(str(error)) from error

    return checked


def _said(outcome: CommandOutcome) -> str:
    """What a command printed, and how it ended if not well."""
    notes = []
    if outcome.stopped:
        notes.append(f"[stopped: {outcome.stopped}]")
    elif outcome.status:
        notes.append(f"[exit status {outcome.status}]")
    return "\n".join([part for part in (outcome.output.rstrip("\n"), *notes) if part]) or "(no output)"


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolFailed(f"{name}: must be a text")
    return value


def _number(arguments: Mapping[str, Any], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ToolFailed(f"{name}: must be an integer of at least 1")
    return value
