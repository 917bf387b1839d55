"""The conversation with an agent on a terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape

from cli.agent.approval import Decision
from cli.agent.commands import Commands, Exit
from cli.agent.loop import Agent, Finish, Turn
from cli.output import CliError, Output

_SHOWN = 2000
"""Characters of a result that are shown; the model sees more."""


class Screen:
    """Shows what an agent does, and asks."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._begun = False

    def show(self, kind: str, piece: str) -> None:
        """See Agent.show."""
        if kind in ("text", "reasoning"):
            self._output.text(piece, style="dim" if kind == "reasoning" else "")
            self._begun = True
            return
        self.end_line()
        if kind == "result" and len(piece) > _SHOWN:
            piece = f"{piece[:_SHOWN]}\n[… {len(piece) - _SHOWN} more characters are not shown here]"
        mark, style = {"call": ("→ ", "cyan"), "result": ("", "dim"), "note": ("· ", "yellow")}[kind]
        self._output.err.print(f"{mark}{piece}", style=style, markup=False, soft_wrap=True)

    def end_line(self) -> None:
        """Ends a line of text that has begun."""
        if self._begun:
            self._output.out.print()
        self._begun = False

    def ask(self, tool: str, arguments: str) -> Decision:
        """Asks on the terminal, where the call stands; anything but yes or always is no."""
        del arguments
        if sys.stdin.isatty():
            termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before is no answer to this
        self._output.err.print(f"[yellow]{escape(tool)} wants to run. y: once, a: always this tool, else: no[/]")
        try:
            answer = self._output.err.input("[yellow]allow? [/]").strip().lower()
        except EOFError:
            return Decision.NO
        return {"y": Decision.YES, "yes": Decision.YES, "a": Decision.ALWAYS}.get(answer, Decision.NO)

    def summary(self, turn: Turn) -> None:
        """A line about a turn that is over."""
        self.end_line()
        parts = [turn.adapter or "base model", f"{turn.prompt_tokens} tokens read, {turn.cached_tokens} from the cache"]
        if turn.finish != Finish.ANSWERED:
            parts.append(turn.finish.value)
        self._output.err.print(f"[dim]{escape(' · '.join(parts))}[/]")


def converse(agent: Agent, output: Output, workspace: Path | None) -> None:
    """Reads questions and commands until the end of input or /exit. Ctrl-C ends a turn, and not the program."""
    screen = Screen(output)
    agent.show = screen.show
    agent.approver.ask = screen.ask
    commands = Commands(agent, workspace)
    output.err.print(f"[dim]session {escape(agent.conversation.session)}; /help lists commands, Ctrl-C stops a turn[/]")
    with _interrupts_raise(), contextlib.closing(commands):
        while True:
            try:
                line = output.err.input("[bold green]> [/]").strip()
            except KeyboardInterrupt:
                output.err.print()
                continue
            except EOFError:
                output.err.print()
                return
            try:
                if line.startswith("/"):
                    output.err.print(commands.run(line), markup=False, soft_wrap=True)
                elif line:
                    commands.begin_turn()
                    screen.summary(agent.turn(line))
            except Exit:
                return
            except CliError as error:
                screen.end_line()
                output.err.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            except KeyboardInterrupt:  # as a command ran
                output.err.print("stopped")


@contextlib.contextmanager
def _interrupts_raise() -> Iterator[None]:
    """Ctrl-C is an exception where it comes, and no more than that."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
