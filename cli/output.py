"""Output and exit status of commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import enum
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from cli.interrupts import noted_interrupts
from services.common.errors import InvalidRequest, TemperError


class ExitCode(enum.IntEnum):
    """Documented in docs/guides/operations.md; a CI pipeline may rely on it."""

    OK = 0
    FAILED = 1
    """The server refused the request, or the job failed or was cancelled."""
    USAGE = 2
    """The command line or a file it names is wrong; nothing was sent."""
    UNREACHABLE = 3
    """No server there, or it says that it cannot serve now (5xx, 429)."""
    TIMED_OUT = 4
    """--timeout passed before the job ended; the job goes on."""
    INTERRUPTED = 130


_PIPE_WIDTH = 240
"""Columns when nobody looks: a table in a log should not be cut to 80."""


class CliError(Exception):
    """Ends a command with one clear line."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED, *, error: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.error = error


_HARMLESS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys((*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
}
"""Characters that command a terminal, or turn the order of what is read → those that are shown instead."""


class CleanConsole(Console):
    """A console that shows text of a model, a server or a file, and is not commanded by it: what the text has of escape
    sequences is seen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See Console; the console's own commands are segments of their own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(segment.text.translate(_HARMLESS), segment.style)


class Output:
    """Prints either for people or, with --json, one JSON document (or line) a result."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.out = CleanConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        self.err = CleanConsole(stderr=True)
        self._lines = False

    def json(self, value: Any, *, line: bool = False) -> None:
        """Writes a document; behind a line all others, errors too, are lines."""
        self._lines |= line
        text = json.dumps(value, ensure_ascii=False, indent=None if self._lines else 2)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def text(self, piece: str, *, style: str = "") -> None:
        """A piece of text from elsewhere; where nobody looks, exactly as it is."""
        if self.out.is_terminal:
            self.out.print(Text(piece, style), end="", soft_wrap=True)
        else:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def result(self, value: Any, text: str) -> None:
        """``value`` with --json, else ``text`` (rich markup)."""
        if self.as_json:
            self.json(value)
        else:
            self.out.print(text, soft_wrap=True)

    def table(self, value: Any, columns: list[str], rows: list[list[str]], *, empty: str) -> None:
        """``value`` with --json, else a table, or ``empty`` when it has no rows; what a gateway could not read of a
        list stands below it."""
        if self.as_json:
            self.json(value)
            return
        unreadable = value.get("unreadable", []) if isinstance(value, dict) else []
        if not rows and not unreadable:
            self.out.print(empty)
        elif rows:
            table = Table(box=None, header_style="bold", pad_edge=False)
            for column in columns:
                table.add_column(column, no_wrap=True)
            for row in rows:
                table.add_row(*(escape(cell) for cell in row))
            self.out.print(table)
        for one in unreadable:
            self.err.print(f"[yellow]not shown:[/] {escape(one['message'])}", soft_wrap=True)


def _code(error: TemperError) -> ExitCode:
    return ExitCode.USAGE if isinstance(error, InvalidRequest) else ExitCode.FAILED


@contextlib.contextmanager
def guarded(output: Output) -> Iterator[None]:
    """Turns a CliError, an error of Temper's or Ctrl-C into one line on standard error and the exit code."""
    with noted_interrupts() as interrupts:
        try:
            yield
        except (CliError, TemperError) as error:
            told, code = (error.error, error.code) if isinstance(error, CliError) else (None, _code(error))
            if output.as_json:
                output.json({"error": told or {"message": error.message}})
            output.err.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(int(code)) from error
        except (KeyboardInterrupt, Exception) as error:
            if not (interrupts or isinstance(error, KeyboardInterrupt)):
                raise
            output.err.print("interrupted")
            raise typer.Exit(int(ExitCode.INTERRUPTED)) from error
