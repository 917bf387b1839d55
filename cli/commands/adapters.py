"""`temper adapters`: what versions exist, which one answers for the base model's name, and moving them in and out."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.http.client import Client, path
from cli.http.transfers import moving
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output
from services.common.adapters.manifest import CONFIG, FILES, WEIGHTS, Kind, instead_of
from services.common.adapters.names import parse_adapter_ref
from services.common.errors import InvalidRequest

app = typer.Typer(name="adapters", help="List, attach, move, merge and roll back adapters.", no_args_is_help=True)

MANIFEST = "manifest.json"
_OF_THE_MOMENT = ("object", "id", "size_bytes", "current", "attached")
"""Fields of a version that are not in its manifest."""
Ref = Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="An adapter, e.g. polite or polite@3.")]


def split(ref: str) -> tuple[str, int | None]:
    """Name and version of a reference; a malformed one is a usage error."""
    try:
        return parse_adapter_ref(ref)
    except InvalidRequest as error:
        raise CliError(error.message, ExitCode.USAGE) from error


def published(client: Client, ref: str) -> tuple[str, int]:
    """Name and version of a reference, the newest if it names none; a malformed one is a usage error."""
    name, version = split(ref)
    if version is None:
        version = int(client.get(path("v1", "adapters", name))["current"])
    return name, version


def _when(seconds: float | str | None) -> str:
    if seconds is None:
        return ""
    if isinstance(seconds, str):
        return seconds.split(".")[0].replace("T", " ")
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _metrics(metrics: dict[str, Any]) -> str:
    shown = [f"{key} {metrics[key]:.4g}" for key in ("loss", "eval_loss", "reward_mean", "kl") if key in metrics]
    return ", ".join(shown)


def _origin(version: dict[str, Any]) -> str:
    """Origin of a version in words."""
    lineage = version.get("lineage")
    if lineage:
        return " + ".join(f"{one['weight']:g}·{one['version']}" for one in lineage["parents"])
    return str(version.get("parent") or "")


@app.command("list")
def list_adapters(url: Url = None, as_json: Json = False) -> None:
    """Every adapter and drafter with its current version."""

    def work(client: Client, output: Output) -> None:
        answer = client.get("/v1/adapters")
        rows = [
            [one["name"], one.get("kind", "adapter"), str(one["current"]), one.get("attached") or ""]
            for one in answer["data"]
        ]
        columns = ["name", "kind", "current", "attached"]
        output.table(answer, columns, rows, empty="No adapters yet: train or upload one.")

    connected(url, as_json, work)


@app.command()
def show(ref: Ref, url: Url = None, as_json: Json = False) -> None:
    """The versions of one adapter; with @VERSION, all about that one."""

    def work(client: Client, output: Output) -> None:
        name, version = split(ref)
        versions = client.get(path("v1", "adapters", name, "versions"))["data"]
        if version is not None:
            found = [one for one in versions if one["version"] == version]
            if not found:
                known = ", ".join(str(one["version"]) for one in versions)
                raise CliError(f"adapter {name} has no version {version}; it has {known}")
            output.json(found[0])
            return
        rows = [
            [
                f"{one['name']}@{one['version']}",
                " ".join(word for word in ("current", "attached") if one.get(word)),
                _when(one.get("created_at")),
                _origin(one),
                one.get("job_id") or "",
                _metrics(one.get("metrics") or {}),
            ]
            for one in versions
        ]
        columns = ["version", "", "created", "from", "job", "metrics"]
        output.table(versions, columns, rows, empty=f"{name} has no versions.")

    connected(url, as_json, work)


@app.command()
def attach(ref: Ref, url: Url = None, as_json: Json = False) -> None:
    """Answer the base model's name with this version (default: the current one) from the next request on."""

    def work(client: Client, output: Output) -> None:
        name, version = split(ref)
        attach_version(client, output, name, version)

    connected(url, as_json, work)


def attach_version(client: Client, output: Output, name: str, version: int | None) -> None:
    body = {} if version is None else {"version": version}
    answer = client.post(path("v1", "adapters", name, "attach"), body)
    output.result(answer, f"attached [green]{answer.get('attached')}[/]")


@app.command()
def detach(
    ref: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Refuse if something else is attached by now.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Answer the base model's name with the base model again."""

    def work(client: Client, output: Output) -> None:
        target = ref or client.get("/v1/adapters").get("attached")
        if target is None:
            output.result({"attached": None}, "nothing is attached")
            return
        name, version = split(target)
        body = {} if version is None else {"version": version}
        answer = client.post(path("v1", "adapters", name, "detach"), body)
        output.result(answer, f"detached {target}: the base model answers")

    connected(url, as_json, work)


@app.command()
def upload(
    directory: Annotated[
        Path, typer.Argument(help=f"Directory with {WEIGHTS} and {CONFIG} (PEFT), or {' and '.join(FILES['drafter'])}.")
    ],
    name: Annotated[str, typer.Option(help="The adapter that gets a new version.")],
    attach_it: Annotated[bool, typer.Option("--attach", help="Attach it, too.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Publish a PEFT adapter, or a drafter, as a new version; refused if it does not bind to the served model."""

    def work(client: Client, output: Output) -> None:
        split(name)
        is_drafter = any((directory / part).is_file() for part in FILES["drafter"])
        files = {part: directory / part for part in FILES["drafter" if is_drafter else "adapter"]}
        for file in files.values():
            if not file.is_file():
                raise CliError(instead_of(file) or f"{file} does not exist", ExitCode.USAGE)
        with moving(output, f"publishing {name}", sum(file.stat().st_size for file in files.values())) as moved:
            answer = client.upload("/v1/adapters", {"name": name}, files, on_block=moved)
        if attach_it:
            attach_version(client, output, name, int(answer["version"]))
        else:
            output.result(answer, f"published [green]{name}@{answer['version']}[/]")

    connected(url, as_json, work)


@app.command()
def download(
    ref: Ref,
    directory: Annotated[Path, typer.Argument(help="Where to put the files; made if it is missing.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Save a version's files and its manifest."""

    def work(client: Client, output: Output) -> None:
        name, version = published(client, ref)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CliError(f"cannot write to {directory}: {error}", ExitCode.USAGE) from error
        with moving(output, f"fetching {name}@{version}", None) as moved:
            saved = save(client, name, version, directory, on_block=moved)
        answer = {"adapter": f"{name}@{version}", "directory": str(directory), "files": [*saved, MANIFEST]}
        output.result(answer, f"saved [green]{name}@{version}[/] in {directory}")

    connected(url, as_json, work)


def save(
    client: Client,
    name: str,
    version: int | None,
    directory: Path,
    *,
    on_block: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """The files and the manifest of a version (default: the current one) into a directory that exists; returns the
    files' names. The manifest says which base model they belong to and what their digests are."""
    if version is None:
        version = int(client.get(path("v1", "adapters", name))["current"])
    listed = client.get(path("v1", "adapters", name, "versions"))["data"]
    manifest = next((one for one in listed if one["version"] == version), None)
    if manifest is None:
        raise CliError(f"there is no {name}@{version}")
    kind: Kind = "drafter" if manifest.get("kind") == "drafter" else "adapter"
    for part in FILES[kind]:
        place = directory / part
        client.download(path("v1", "adapters", name, "download"), place, on_block=on_block, version=version, file=part)
    text = json.dumps({key: value for key, value in manifest.items() if key not in _OF_THE_MOMENT}, indent=1)
    (directory / MANIFEST).write_text(text, encoding="utf-8")
    return list(FILES[kind])
