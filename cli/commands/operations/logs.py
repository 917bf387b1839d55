"""`temper logs`: what the processes of `temper up` write."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cli.local.process import tail
from cli.output import CliError, ExitCode, Output, guarded

_PAUSE_SECONDS = 0.2


def logs(
    process: Annotated[
        str | None,
        typer.Argument(
            help="gateway, engine, valkey or s3.",
            show_default="all of them",
            autocompletion=lambda: ["gateway", "engine", "valkey", "s3"],
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Lines from the end of each.", min=0)] = 20,
    data_dir: Annotated[Path, typer.Option(help="As of `temper up`.")] = Path(".temper"),
) -> None:
    """Print the logs of the processes that `temper up` runs, or ran last."""
    output = Output(as_json=False)
    with guarded(output):
        directory = data_dir / "logs"
        names = sorted(file.stem for file in directory.glob("*.log") if not file.stem.endswith(".1"))
        if not names:
            raise CliError(
                f"{directory} has no logs: `temper up` writes them there, --data-dir names another", ExitCode.USAGE
            )
        if process is not None and process not in names:
            raise CliError(f"no process {process!r} has written a log: there are {', '.join(names)}", ExitCode.USAGE)
        chosen = [Log(directory / f"{name}.log") for name in names if process in (None, name)]
        width = 0 if process else max(len(log.name) for log in chosen)
        for log in chosen:
            for line in log.last(lines):
                _write(output, log.name, line, width)
        while follow:
            for log in chosen:
                for line in log.new():
                    _write(output, log.name, line, width)
            time.sleep(_PAUSE_SECONDS)


class Log:
    """A log file that others append to, and now and then move aside."""

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        self._file = file
        self._open = file.open("rb")
        self._open.seek(0, os.SEEK_END)
        self._rest = b""

    def last(self, count: int) -> list[str]:
        """The last lines of the file."""
        return tail(self._file, lines=count) if count else []

    def new(self) -> Iterator[str]:
        """Whole lines that have come since this object was made, of a file that was moved aside to its end, and then of
        the one that took its place."""
        yield from self._read()
        with contextlib.suppress(FileNotFoundError):  # it is just being moved aside
            found = self._file.stat()
            if found.st_ino != os.fstat(self._open.fileno()).st_ino or found.st_size < self._open.tell():
                following = self._file.open("rb")
                self._open.close()
                self._open, self._rest = following, b""
                yield from self._read()

    def _read(self) -> Iterator[str]:
        *whole, self._rest = (self._rest + self._open.read()).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")


def _write(output: Output, name: str, line: str, width: int) -> None:
    output.text(f"{name:{width}} | {line}\n" if width else f"{line}\n")
