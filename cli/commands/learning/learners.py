"""`temper learner`: policies by which adapters get better from the traffic."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.http.client import Client, path
from cli.job_files import apply_settings, read_text
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output

app = typer.Typer(name="learner", help="Have adapters get better from the traffic, by a policy.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="LEARNER", help="A learner's name.")]
_COLOURS = {"stopped": "red", "paused": "yellow", "collecting": "green"}


@app.command()
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The policy; JSON is YAML, too.")],
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One more field, e.g. trigger.min_rows=50.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make a learner, or give the one of that name this policy."""

    def work(client: Client, output: Output) -> None:
        body = _read(file)
        apply_settings(body, setting or ())
        if not isinstance(body.get("name"), str):
            raise CliError(f"{file}: a policy has a name", ExitCode.USAGE)
        one = client.put(path("v1", "learners", body["name"]), body)
        output.result(one, _line(one))

    connected(url, as_json, work)


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise CliError(f"{file} is not YAML: {' '.join(str(error).split())}", ExitCode.USAGE) from error
    if not isinstance(found, dict):
        raise CliError(f"{file}: a policy is a mapping of fields", ExitCode.USAGE)
    return found


@app.command("list")
def list_learners(
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=1000)] = 100,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """All learners, and where each stands."""

    def work(client: Client, output: Output) -> None:
        answer = client.get("/v1/learners", limit=limit)
        rows = [
            [
                one["id"],
                one["policy"]["adapter"],
                one["policy"]["method"],
                one["state"],
                str(one["cycle"]),
                one["outcome"] or "",
                one["promoted"] or "",
            ]
            for one in answer["data"]
        ]
        columns = ["learner", "adapter", "method", "state", "cycle", "last", "promoted"]
        output.table(answer, columns, rows, empty="No learners yet: make one with `temper learner apply FILE.yaml`.")

    connected(url, as_json, work)


@app.command()
def show(learner: Name, url: Url = None, as_json: Json = False) -> None:
    """Where a learner stands, and its policy."""

    def work(client: Client, output: Output) -> None:
        one = client.get(path("v1", "learners", learner))
        lines = [_line(one)]
        for field in ("dataset", "job", "candidate", "canary", "outcome", "promoted"):
            if one[field]:
                lines.append(f"  {field:<9} {escape(str(one[field]))}")
        lines += [f"  {key}: {escape(json.dumps(value))}" for key, value in one["policy"].items() if value]
        output.result(one, "\n".join(lines))

    connected(url, as_json, work)


@app.command()
def events(
    learner: Name,
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=1000)] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """What happened to a learner, newest first; --json has the evidence."""

    def work(client: Client, output: Output) -> None:
        answer = client.get(path("v1", "learners", learner, "events"), limit=limit)
        rows = [[_when(one["at"]), str(one["cycle"]), one["kind"], escape(one["detail"])] for one in answer["data"]]
        output.table(answer, ["at", "cycle", "event", ""], rows, empty="Nothing has happened yet.")

    connected(url, as_json, work)


@app.command()
def plan(learner: Name, url: Url = None, as_json: Json = False) -> None:
    """What a cycle would do if it began now. Nothing is done."""

    def work(client: Client, output: Output) -> None:
        found = client.get(path("v1", "learners", learner, "plan"))
        rows = ", ".join(f"{count} {split}" for split, count in found["rows"].items())
        share = found["canary_share"]
        lines = [
            f"[bold]{escape(learner)}[/]  {'a cycle begins' if found['begins'] else 'waits'}: {escape(found['why'])}",
            f"  data      {rows}; {found['examples']} examples",
            f"  job       {found['job']['adapter']}: {escape(json.dumps(found['job']))}",
            f"  gate      {', '.join(found['suites']) or 'no suites'}",
            f"  then      {'promoted at once' if share is None else f'canary with {share:.0%} of the traffic'}",
        ]
        lines += [f"  [red]problem[/]   {escape(problem)}" for problem in found["problems"]]
        output.result(found, "\n".join(lines))

    connected(url, as_json, work)


@app.command()
def pause(learner: Name, url: Url = None, as_json: Json = False) -> None:
    """Begin no further step; a job or a canary that runs goes on."""
    _do(learner, "pause", url, as_json)


@app.command()
def resume(learner: Name, url: Url = None, as_json: Json = False) -> None:
    """Go on after a pause, a stop or a failed cycle."""
    _do(learner, "resume", url, as_json)


@app.command()
def run(learner: Name, url: Url = None, as_json: Json = False) -> None:
    """Begin a cycle now, whatever the trigger says."""
    _do(learner, "run", url, as_json)


@app.command()
def delete(learner: Name, url: Url = None, as_json: Json = False) -> None:
    """Remove a learner and cancel its job; data sets and versions stay."""

    def work(client: Client, output: Output) -> None:
        output.result(client.delete(path("v1", "learners", learner)), f"{escape(learner)} is removed")

    connected(url, as_json, work)


def _do(learner: str, what: str, url: str | None, as_json: bool) -> None:
    def work(client: Client, output: Output) -> None:
        one = client.post(path("v1", "learners", learner, what))
        output.result(one, _line(one))

    connected(url, as_json, work)


def _line(one: dict[str, Any]) -> str:
    state = one["state"]
    told = f"[bold]{one['id']}[/]  {one['policy']['method']} → {one['policy']['adapter']}"
    return f"{told}  [{_COLOURS.get(state, 'cyan')}]{state}[/], cycle {one['cycle']}, policy {one['revision']}"


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
