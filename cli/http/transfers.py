"""Files that go to a server or come from one, and the bar of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from cli.output import CliError, ExitCode, Output


def size_of(file: Path) -> int:
    """Bytes of a file that is to be sent.

    Raises:
        CliError: it cannot be.
    """
    try:
        if file.exists() and not file.is_file():
            raise CliError(f"{file} is not a file", ExitCode.USAGE)
        with file.open("rb"):
            return file.stat().st_size
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror or error}", ExitCode.USAGE) from error


@contextmanager
def moving(output: Output, what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for people. Yields what is to be called with the number of bytes of each piece.

    Args:
        size: of all; None: nobody knows.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=output.err,
        transient=True,
        disable=output.as_json or not output.err.is_terminal,
    )
    with progress:
        task = progress.add_task(what, total=size)
        yield lambda moved: progress.advance(task, moved)
