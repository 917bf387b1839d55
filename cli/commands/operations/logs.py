"""`temper logs`: what the processes of `temper up` write, or those of a server with --url."""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from cli.http.client import Client, parse_json
from cli.local.process import tail
from cli.options import Json, Url
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read
from services.common.telemetry.recent_logs import MOST_LINES

_PAUSE_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0
"""Longest time that a followed server may be away."""
_OVERLAP_SECONDS = 3.0
"""Processes are asked one after the other: a line may come behind one that was written a little later."""
_NAME_WIDTH = 8


class LogLevel(enum.StrEnum):
    """Severity of a line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def logs(
    process: Annotated[
        str | None,
        typer.Argument(
            help="gateway, engine, valkey or s3; with --url gateway or the name of an engine.",
            show_default="all of them",
            autocompletion=lambda: ["gateway", "engine", "valkey", "s3"],
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Lines from the end of each.", min=0)] = 20,
    level: Annotated[
        LogLevel | None, typer.Option(help="With --url: the least severe level.", show_default="debug")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="With --url: what a line has somewhere.")] = None,
    request: Annotated[
        str | None, typer.Option("--request", help="With --url: x-request-id, or the id of a completion.")
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="As of `temper up`.")] = Path(".temper"),
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print the logs of the processes that `temper up` runs, or ran last. With --url: the last lines of the gateway
    there and of its engines, as many as they keep in memory; with keys, that takes one of the scope admin."""
    output = Output(as_json=as_json)
    with guarded(output):
        wanted = {"level": level and level.value, "text": text, "request_id": request}
        asked = {name: value for name, value in wanted.items() if value is not None}
        if url is not None:
            with Client(url, read(CliSettings)) as client:
                _of_server(
                    client, output, {**asked, **({} if process is None else {"process": process})}, lines, follow
                )
            return
        if asked or as_json:
            raise CliError(
                "--level, --text, --request and --json are for a server, by --url: these logs are files, for grep",
                ExitCode.USAGE,
            )
        _of_files(output, data_dir / "logs", process, lines, follow)


def _of_files(output: Output, directory: Path, process: str | None, lines: int, follow: bool) -> None:
    names = sorted(file.stem for file in directory.glob("*.log") if not file.stem.endswith(".1"))
    if not names:
        raise CliError(
            f"{directory} has no logs: `temper up` writes them there, --data-dir names another, and --url a server",
            ExitCode.USAGE,
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


def _of_server(client: Client, output: Output, asked: dict[str, str], lines: int, follow: bool) -> None:
    for line in _followed(client, asked, lines) if follow else _last(client, output, asked, lines):
        if output.as_json:
            output.json(line, line=True)
            continue
        when = datetime.datetime.fromtimestamp(line["time"]).astimezone().isoformat(timespec="milliseconds")
        about = {"request_id": line["request_id"], **line["fields"]}
        rest = "".join(f" {name}={value}" for name, value in about.items() if value is not None)
        trace = f"\n{line['exception']}" if line["exception"] else ""
        _write(output, line["process"], f"{when} {line['level']:7} {line['message']}{rest}{trace}", _NAME_WIDTH)


def _last(client: Client, output: Output, asked: dict[str, str], lines: int) -> list[dict[str, Any]]:
    if not 1 <= lines <= MOST_LINES:
        raise CliError(f"--lines of a server is 1 to {MOST_LINES}", ExitCode.USAGE)
    answer = client.get("/v1/logs", limit=lines, **asked)
    for engine in answer["unreachable"]:
        output.err.print(f"{engine} does not answer: its lines are missing", markup=False, soft_wrap=True)
    found: list[dict[str, Any]] = answer["data"]
    return found


def _followed(client: Client, asked: dict[str, str], lines: int) -> Iterator[dict[str, Any]]:
    """Lines until Ctrl-C; a server that restarts is waited for."""
    since, known = (0.0 if lines else time.time()), deque[str](maxlen=5 * MOST_LINES)
    lines, heard = max(1, min(lines, MOST_LINES)), float("-inf")
    while True:
        query = urlencode({**asked, "limit": lines, "since": since, "follow": "true"})
        try:
            for event in client.events("GET", f"/v1/logs?{query}"):
                line = parse_json(event.data)
                heard, lines = time.monotonic(), MOST_LINES  # behind a lost connection all that has come since
                if line["id"] not in known:
                    known.append(line["id"])
                    since = max(since, line["time"] - _OVERLAP_SECONDS)
                    yield line
        except CliError as error:
            if error.code is not ExitCode.UNREACHABLE or time.monotonic() - heard > _PATIENCE_SECONDS:
                raise
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
