"""`temper forge submit|show|list|delete`: forge runs of a server's model, as jobs in its queue."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.markup import escape

from cli.http.client import Client, path
from cli.http.job_events import watch
from cli.job_files import apply_settings, read_lines
from cli.options import Json, Timeout, Url, Wait, connected
from cli.output import CliError, ExitCode, Output
from cli.reports.forge import forged
from services.common.errors import InvalidRequest
from services.common.jobs import ForgeJob
from services.common.jobs.forge_recipe import read_mapping
from services.common.validation.errors import problem

RunId = Annotated[str, typer.Argument(metavar="RUN", help="An id as `temper forge submit` prints it.")]
_FILES = {"data": "examples", "held_out": "eval_examples"}
"""Fields of a recipe that name files → fields of a job that hold what is in them."""
_NOT_SENT = {
    "model": "a job forges the model that the engines serve",
    "output": "the result of a job goes into the server's object store",
    "sign": "a key stays on its machine: the server signs with that of TEMPER_FORGE_KEY_FILE",
    "data_name": "data of a job are called so by its id",
}


def submit(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="What is to go, data, and suites by name.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One more setting, e.g. prune.mlp_channels=25%."),
    ] = None,
    wait: Wait = False,
    timeout: Timeout = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make a smaller model of the one that a server's engines serve, beside their traffic."""

    def work(client: Client, output: Output) -> None:
        made = client.post("/v1/forge", _job(recipe, setting or ()), patient=True)
        if not wait:
            output.result(made, f"{made['id']} queued; look at it with: temper forge show {made['id']}")
            return
        watch(client, output, made["id"], timeout=timeout, called="forge run")
        _show(output, client.get(path("v1", "forge", made["id"])))

    connected(url, as_json, work)


def show(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """A forge run on a server: its state, and once it has ended, where its checkpoint is and how good."""
    connected(url, as_json, lambda client, output: _show(output, client.get(path("v1", "forge", run))))


def list_runs(
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=100)] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The newest forge runs of a server."""

    def work(client: Client, output: Output) -> None:
        answer = client.get("/v1/forge", limit=limit)
        rows = [
            [
                one["id"],
                one["state"],
                f"{one['progress']['step']}/{one['progress']['total_steps']}",
                one["model"] or "",
                datetime.datetime.fromtimestamp(one["created_at"]).strftime("%Y-%m-%d %H:%M:%S"),
            ]
            for one in answer["data"]
        ]
        columns = ["run", "state", "stages", "model", "created"]
        output.table(answer, columns, rows, empty="No forge runs yet: submit one with `temper forge submit`.")

    connected(url, as_json, work)


def delete(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """Remove the checkpoint of a forge run on a server from its object store; the run stays in the list."""

    def work(client: Client, output: Output) -> None:
        output.result(client.delete(path("v1", "forge", run)), f"{escape(run)}: its checkpoint is gone")

    connected(url, as_json, work)


def _job(recipe: Path, settings: list[str] | tuple[()]) -> dict[str, Any]:
    """The job of a recipe, checked, with the data of its files."""
    try:
        body = read_mapping(recipe)
    except InvalidRequest as error:
        raise CliError(error.message, ExitCode.USAGE) from error
    apply_settings(body, settings)
    for field, reason in _NOT_SENT.items():
        if field in body:
            raise CliError(f"{recipe}: {field}: {reason}; leave it out", ExitCode.USAGE)
    for field, sent in _FILES.items():
        if (named := body.pop(field, None)) is not None:
            if not isinstance(named, str):
                raise CliError(f"{recipe}: {field} must be the path of a JSONL file", ExitCode.USAGE)
            body[sent] = [row for _, row in read_lines(recipe.parent / named)]
    try:
        return ForgeJob.model_validate(body).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        raise CliError(f"{recipe}: {problem(error, ForgeJob, body)}", ExitCode.USAGE) from error


def _show(output: Output, one: dict[str, Any]) -> None:
    reason = f"  {escape(one['reason'])}" if one["reason"] else ""
    progress = one["progress"]
    text = f"[bold]{one['id']}[/]  {one['state']}  {progress['step']}/{progress['total_steps']} stages{reason}"
    if one["model"] is not None:
        text += f"\n{forged(one, one['model'])}"
    output.result(one, text)
