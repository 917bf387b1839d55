"""Output and exit status of commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import enum
import json
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.interrupts import noted_interrupts
from cli.settings import BadSettings


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


class Output:
    """Prints either for people or, with --json, one JSON document (or line) a result."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        self.err = Console(stderr=True, highlight=False)

    def json(self, value: Any, *, line: bool = False) -> None:
        text = json.dumps(value, ensure_ascii=False, indent=None if line else 2)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def result(self, value: Any, text: str) -> None:
        """``value`` with --json, else ``text`` (rich markup)."""
        if self.as_json:
            self.json(value)
        else:
            self.out.print(text, soft_wrap=True)

    def table(self, value: Any, columns: list[str], rows: list[list[str]], *, empty: str) -> None:
        """``value`` with --json, else a table, or ``empty`` when it has no rows."""
        if self.as_json:
            self.json(value)
        elif not rows:
            self.out.print(empty)
        else:
            table = Table(box=None, header_style="bold", pad_edge=False)
            for column in columns:
                table.add_column(column, no_wrap=True)
            for row in rows:
                table.add_row(*(escape(cell) for cell in row))
            self.out.print(table)


@contextlib.contextmanager
def guarded(output: Output) -> Iterator[None]:
    """Turns a CliError or Ctrl-C into one line on standard error and the exit code."""
    with noted_interrupts() as interrupts:
        try:
            yield
        except CliError as error:
            if output.as_json:
                output.json({"error": error.error or {"message": error.message}})
            output.err.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(int(error.code)) from error
        except BadSettings as error:
            output.err.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(int(ExitCode.USAGE)) from error
        except (KeyboardInterrupt, Exception) as error:
            if not (interrupts or isinstance(error, KeyboardInterrupt)):
                raise
            output.err.print("interrupted")
            raise typer.Exit(int(ExitCode.INTERRUPTED)) from error
