"""`temper doctor`: what is wrong here, and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn

from cli.doctor.findings import Checked, Report, Status
from cli.local.model_directory import model_directory
from cli.options import Json, Model
from cli.output import Output, guarded
from services.common.telemetry.process import installed_version

_COLOURS = {Status.OK: "green", Status.SKIPPED: "dim", Status.WARNING: "yellow", Status.FAILURE: "bold red"}


def doctor(
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="A server to send a request to.", show_default="http://localhost:8420, if it answers"
        ),
    ] = None,
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address for the HTTP API.", envvar="TEMPER_HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for it.", min=1, max=65535, envvar="TEMPER_PORT")] = 8420,
    data_dir: Annotated[Path, typer.Option(help="As of `temper up`.")] = Path(".temper"),
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended safely, and say what was done.")] = False,
    as_json: Json = False,
) -> None:
    """Check Python, card, ports, Redis, S3, model, disk, keys and server. Exit status 0: all is well, 1: warnings, 2:
    something does not work."""
    # Imported here: other commands need none of it.
    from cli.doctor.check import examine
    from cli.doctor.place import Place
    from cli.doctor.registry import CHECKS

    output = Output(as_json=as_json)
    with guarded(output):
        place = Place(model_directory(model, output, fetch=False), data_dir, url, host, port, output)
        checked: list[Checked] = []
        untold: set[str] = set()
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            console=output.err,
            transient=True,
            disable=as_json or not output.err.is_terminal,
        ) as progress:
            task = progress.add_task(CHECKS[0].name)
            for number, entry in enumerate(examine(place, CHECKS, fix=fix), start=1):
                checked.append(entry)
                concern, _, detail = entry.check.partition(".")
                if entry.finding.status is Status.SKIPPED and not detail:
                    untold.add(concern)
                if not as_json and not (detail and concern in untold and entry.finding.status is Status.SKIPPED):
                    _tell(output, entry)
                progress.update(task, description=CHECKS[number].name if number < len(CHECKS) else "")
        report = Report(installed_version(), checked)
        if as_json:
            output.json(report.document())
        else:
            _sum_up(output, report)
        raise typer.Exit(report.exit_code)


def _tell(output: Output, entry: Checked) -> None:
    finding = entry.finding
    colour = _COLOURS[finding.status]
    line = f"[{colour}]{finding.status.value:8}[/] {entry.check:24} {escape(finding.message)}"
    output.out.print(line, soft_wrap=True)
    if entry.mended:
        output.out.print(f"{'':34}[green]mended:[/] {escape(entry.mended)}", soft_wrap=True)
    if finding.way_out:
        again = " (or --fix)" if finding.mend is not None else ""
        output.out.print(f"{'':34}→ {escape(finding.way_out)}{again}", soft_wrap=True)


def _sum_up(output: Output, report: Report) -> None:
    counts = {status: sum(entry.finding.status is status for entry in report.checked) for status in Status}
    texts = [f"{count} {status.value}" for status, count in counts.items() if count]
    output.out.print(f"[{_COLOURS[report.status]}]{report.status.value}[/]: {', '.join(texts)}")
