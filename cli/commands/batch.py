"""`temper batch`: submit, look at and cancel batches of requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cli.http.client import Client, path
from cli.http.transfers import moving, size_of
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output

app = typer.Typer(name="batch", help="Submit, look at and cancel batches of requests.", no_args_is_help=True)

TERMINAL = ("completed", "failed", "expired", "cancelled")
_PATIENCE = 60.0
"""Seconds that a watched server may be away (a restart) before the watch gives up."""
_POLL_SECONDS = 0.5
_LINE_LIMIT = 2**26
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="A batch id.")]


@app.command()
def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help='Lines of {"custom_id", "method", "url", "body"}.')
    ],
    endpoint: Annotated[
        str | None, typer.Option(help="What the requests are for.", show_default="the url of the first line")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow it to its end; exit code 1 if it is not completed.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="With --wait: where the results go; those of failed requests beside it.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait; exit code 4 after that.", min=0)] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Upload a file of requests and run them when there is room."""

    def work(client: Client, out: Output) -> None:
        if output is not None and not wait:
            raise CliError("--output needs --wait: there are no results before the end", ExitCode.USAGE)
        target = endpoint or _first_url(file)
        with moving(out, "sending", size_of(file)) as moved:
            uploaded = client.upload("/v1/files", {"purpose": "batch"}, {"file": file}, on_block=moved)
        batch = client.post(
            "/v1/batches", {"input_file_id": uploaded["id"], "endpoint": target, "completion_window": "24h"}
        )
        if not wait:
            out.result(batch, f"{batch['id']} queued; look at it with: temper batch status {batch['id']}")
            return
        _conclude(client, out, watch(client, out, str(batch["id"]), timeout), output)

    connected(url, as_json, work)


@app.command()
def status(
    batch: Annotated[str | None, typer.Argument(metavar="[BATCH]", help="Without it: the newest batches.")] = None,
    limit: Annotated[int, typer.Option(help="How many batches to list.", min=1, max=100)] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """One batch, or the newest ones."""

    def work(client: Client, out: Output) -> None:
        if batch is not None:
            one = client.get(path("v1", "batches", batch))
            out.result(one, _describe(one))
            return
        answer = client.get("/v1/batches", limit=limit)
        rows = [[one["id"], one["endpoint"], one["status"], _counts(one)] for one in answer["data"]]
        out.table(
            answer,
            ["batch", "endpoint", "status", "requests"],
            rows,
            empty="No batches yet: submit one with `temper batch submit`.",
        )

    connected(url, as_json, work)


@app.command()
def cancel(batch: BatchId, url: Url = None, as_json: Json = False) -> None:
    """Stop a batch; what has run by then is kept."""

    def work(client: Client, out: Output) -> None:
        stopped = client.post(path("v1", "batches", batch, "cancel"))
        out.result(stopped, f"{stopped['id']} {stopped['status']}")

    connected(url, as_json, work)


def watch(client: Client, output: Output, batch_id: str, timeout: float | None) -> dict[str, Any]:
    """Shows a batch until it has ended, and returns it.

    Raises:
        CliError: the server stayed away, or the timeout passed.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        console=output.err,
        disable=output.as_json or not output.err.is_terminal,
    )
    shown = ""
    with progress:
        task = progress.add_task(batch_id, total=None, status="")
        batch: dict[str, Any] = {}
        for batch in _states(client, batch_id, timeout):
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(task, completed=done, total=counts["total"] or None, status=batch["status"])
            if progress.disable and not output.as_json and batch["status"] != shown:
                shown = batch["status"]
                output.err.print(f"{batch_id} {shown}  {_counts(batch)}", soft_wrap=True)
    return batch


def _states(client: Client, batch_id: str, timeout: float | None) -> Iterator[dict[str, Any]]:
    """States of a batch as the server says them, until it has ended."""
    began = time.monotonic()
    away_since: float | None = None
    while True:
        try:
            batch = client.get(path("v1", "batches", batch_id))
            away_since = None
            yield batch
            if batch["status"] in TERMINAL:
                return
        except CliError as error:
            away_since = time.monotonic() if away_since is None else away_since
            if error.code is not ExitCode.UNREACHABLE or time.monotonic() - away_since > _PATIENCE:
                raise
        if timeout is not None and time.monotonic() - began > timeout:
            raise CliError(f"{batch_id} has not ended in time; it goes on without us", ExitCode.TIMED_OUT)
        time.sleep(_POLL_SECONDS)


def _conclude(client: Client, out: Output, batch: dict[str, Any], target: Path | None) -> None:
    """Fetches the results and says how a batch ended.

    Raises:
        CliError: it is not completed.
    """
    written = []
    if target is not None:
        for file_id, place in (
            (batch["output_file_id"], target),
            (batch["error_file_id"], target.with_name(f"{target.stem}.errors{target.suffix}")),
        ):
            if file_id is not None:
                with moving(out, f"fetching {place.name}", None) as moved:
                    client.download(path("v1", "files", file_id, "content"), place, on_block=moved)
                written.append(str(place))
    if batch["status"] != "completed":
        errors = (batch.get("errors") or {}).get("data") or []
        why = "; ".join(_error(error) for error in errors[:5])
        raise CliError(
            f"batch {batch['id']} {batch['status']}{': ' if why else ''}{why}", error={"message": why, "batch": batch}
        )
    files = f"; wrote {', '.join(written)}" if written else ""
    out.result(batch, f"[green]{batch['id']} completed[/]: {_counts(batch)}{escape(files)}")


def _error(error: dict[str, Any]) -> str:
    return error["message"] if error.get("line") is None else f"line {error['line']}: {error['message']}"


def _counts(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['completed']}/{counts['total']}{failed}"


def _describe(batch: dict[str, Any]) -> str:
    colour = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "yellow"}
    lines = [
        f"[bold]{batch['id']}[/]  {batch['endpoint']}  [{colour.get(batch['status'], 'cyan')}]{batch['status']}[/]"
    ]
    lines.append(f"  requests  {_counts(batch)}")
    for name, file_id in (("output", batch["output_file_id"]), ("errors", batch["error_file_id"])):
        if file_id is not None:
            lines.append(f"  {name:8}  {file_id}")
    for error in (batch.get("errors") or {}).get("data") or []:
        lines.append(f"  [red]{escape(_error(error))}[/]")
    return "\n".join(lines)


def _first_url(file: Path) -> str:
    """Raises CliError: the file cannot be read, or its first line is no request."""
    try:
        with file.open("rb") as lines:
            first = next((line for line in iter(lambda: lines.readline(_LINE_LIMIT), b"") if line.strip()), b"")
        url = json.loads(first)["url"]
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror or error}", ExitCode.USAGE) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(
            f'{file}: the first line is no request {{"custom_id", "method", "url", "body"}}', ExitCode.USAGE
        ) from error
    return str(url)
