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
        str | None, typer.Argument(help="gateway, engine, valkey or s3.", show_default="all of them")
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
        self._inode, self._offset = _place(file)
        self._rest = b""

    def last(self, count: int) -> list[str]:
        """The last lines that were there when this object was made."""
        return tail(self._file, lines=count) if count else []

    def new(self) -> Iterator[str]:
        """Whole lines that have come since, also into a file that took this one's place."""
        inode, size = _place(self._file)
        if inode != self._inode or size < self._offset:
            self._inode, self._offset, self._rest = inode, 0, b""
        if size == self._offset:
            return
        data = b""
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:  # just moved aside
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")


def _place(file: Path) -> tuple[int, int]:
    """Inode and size; zeros: it is not there, for it is just being moved aside."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_size


def _write(output: Output, name: str, line: str, width: int) -> None:
    output.text(f"{name:{width}} | {line}\n" if width else f"{line}\n")
