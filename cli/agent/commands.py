"""Commands of the conversation: /help, /model, /adapter, /tools, /save, /load, /trace, /undo and /exit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.agent.conversation import Conversation
from cli.agent.loop import Agent
from cli.agent.snapshots import NOT_COPIED, Snapshot
from cli.agent.tools import Tool
from cli.agent.trace import Trace
from cli.output import CliError, ExitCode

_MOST_UNDONE = 8


class Exit(Exception):
    """Ends the conversation."""


@dataclass(slots=True)
class _Past:
    """What a turn began with."""

    turns: list[dict[str, Any]]
    files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    snapshot: Snapshot | None = None
    changed: bool = False
    """Whether a tool was called that changes something."""


class Commands:
    """Commands on an agent, and the past that /undo goes back to. ``close`` ends it.

    Args:
        workspace: None: there are no tools that change one.
    """

    def __init__(self, agent: Agent, workspace: Path | None) -> None:
        self._agent = agent
        self._workspace = workspace
        self._all_tools: Mapping[str, Tool] = {tool.name: tool for tool in agent.tools}
        self._past: list[_Past] = []
        self._reward = 0.0
        agent.before_change = self._keep_files
        self.all: Mapping[str, tuple[str, Callable[[str], str]]] = {
            "help": ("this list", self._help),
            "model": ("NAME: the model that answers from now on; alone: which it is", self._model),
            "adapter": ('NAME, NAME@3 or base: the adapter; "none": what is attached', self._adapter),
            "tools": ("on NAME or off NAME: offer a tool or do not; alone: list them", self._tools),
            "save": ("FILE: write the conversation", self._save),
            "load": ("FILE: go on with one that was written", self._load),
            "trace": ("FILE, off, or reward NUMBER for the last turn: trajectories for training", self._trace),
            "undo": ("take back the last turn, in the conversation and in the workspace", self._undo),
            "exit": ("end; Ctrl-D does, too", self._exit),
        }

    def run(self, line: str) -> str:
        """Runs "/name argument", and returns what to tell. Raises CliError and Exit."""
        name, _, argument = line.removeprefix("/").partition(" ")
        if name not in self.all:
            raise CliError(f"there is no /{name}: /help lists the commands", ExitCode.USAGE)
        return self.all[name][1](argument.strip())

    def begin_turn(self) -> None:
        """Remembers what /undo goes back to."""
        self.end_attempt()
        self._past.append(_Past(list(self._agent.conversation.turns)))
        for gone in self._past[:-_MOST_UNDONE]:
            gone.files.close()
        del self._past[:-_MOST_UNDONE]

    def end_attempt(self) -> None:
        """Writes the last turn to the trace, with the reward that it was given."""
        if self._agent.trace is not None:
            self._agent.trace.end_attempt(self._reward)
            self._agent.trace.write()
        self._reward = 0.0

    def close(self) -> None:
        """Writes what is left to the trace, and removes copies of the workspace."""
        self.end_attempt()
        self._forget()

    def _forget(self) -> None:
        for past in self._past:
            past.files.close()
        self._past.clear()

    def _keep_files(self) -> None:
        if self._workspace is None or not self._past or self._past[-1].changed:
            return
        past = self._past[-1]
        past.changed = True
        past.snapshot = past.files.enter_context(Snapshot.taken(self._workspace))

    def _help(self, _: str) -> str:
        return "\n".join(f"/{name:<8} {text}" for name, (text, _) in self.all.items())

    def _model(self, name: str) -> str:
        if name:
            self._agent.conversation.model = name
        return f"model: {self._agent.conversation.model}"

    def _adapter(self, name: str) -> str:
        if name:
            self._agent.conversation.adapter = None if name == "none" else name
        return f"adapter: {self._agent.conversation.adapter or 'what is attached'}"

    def _tools(self, argument: str) -> str:
        word, _, name = argument.partition(" ")
        offered = {tool.name for tool in self._agent.tools}
        if argument:
            if word not in ("on", "off") or name not in self._all_tools:
                raise CliError(f"/tools on NAME or off NAME, of {', '.join(self._all_tools) or 'none'}", ExitCode.USAGE)
            offered = offered | {name} if word == "on" else offered - {name}
            self._agent.tools = [tool for tool in self._all_tools.values() if tool.name in offered]
        return "\n".join(
            f"{'on ' if tool.name in offered else 'off'} {tool.name} ({tool.effect.name.lower()}): {tool.description}"
            for tool in self._all_tools.values()
        )

    def _save(self, file: str) -> str:
        self._agent.conversation.save(Path(_needed(file, "/save FILE")))
        return f"saved to {file}"

    def _load(self, file: str) -> str:
        self._agent.conversation = Conversation.load(Path(_needed(file, "/load FILE")))
        self._agent.tokens = 0
        self._forget()  # /undo goes back in one conversation
        return f"{len(self._agent.conversation.turns)} messages; session {self._agent.conversation.session}"

    def _trace(self, argument: str) -> str:
        word, _, value = argument.partition(" ")
        if word == "reward":
            try:
                self._reward = float(value)
            except ValueError as error:
                raise CliError(f"/trace reward NUMBER: {value!r} is none", ExitCode.USAGE) from error
            return f"the last turn is written with reward {self._reward:g}"
        self.end_attempt()
        self._agent.trace = None if word == "off" else Trace(Path(_needed(argument, "/trace FILE")))
        return "no trace" if self._agent.trace is None else f"tracing to {argument}"

    def _undo(self, _: str) -> str:
        if not self._past:
            raise CliError("there is no turn to undo", ExitCode.USAGE)
        past = self._past.pop()
        self._agent.conversation.turns[:] = past.turns
        self._agent.tokens = 0
        with past.files:
            if not past.changed:
                return "the last turn is taken back; it called nothing that changes files"
            if past.snapshot is None:
                return f"the last turn is taken back, but not its files: the workspace {NOT_COPIED}"
            past.snapshot.restore()
        return "the last turn is taken back, and the files of the workspace"

    def _exit(self, _: str) -> str:
        raise Exit


def _needed(argument: str, usage: str) -> str:
    if not argument:
        raise CliError(usage, ExitCode.USAGE)
    return argument
