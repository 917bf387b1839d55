"""`temper eval suites`: suites that evaluations run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.http.client import Client, path
from cli.job_files import apply_settings, read_object, read_text
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output
from services.common.errors import InvalidRequest
from services.common.evaluation.readers.formats import FORMATS

app = typer.Typer(name="suites", help="Make, list, show and remove suites.", no_args_is_help=True)

SHIPPED = Path(__file__).resolve().parents[3] / "models" / "tiny" / "suites"
"""Suites that come with Temper: {suite}.jsonl with items, {suite}.json with everything else."""
_PAGE = 1000
_SHOWN = 60
"""Characters of a prompt and of an answer in a table."""
Ref = Annotated[
    str, typer.Argument(metavar="NAME[@VERSION]", help="A suite, e.g. sums (its newest version) or sums@2.")
]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="The suite that gets a new version.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.jsonl]", help='Lines of {"prompt" or "messages", "expected", …}.'),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME[@VERSION]", help="A data set, whose held-out rows become the suite."),
    ] = None,
    scorer: Annotated[str | None, typer.Option(help="Type of the scorer, e.g. exact, numeric, regex.")] = None,
    settings: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Scorer, few_shot, sampling and the like, as the API has them."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One more setting, e.g. sampling.max_tokens=16."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help=f"FILE is a published set: {', '.join(FORMATS)}. Its scorer comes with it."),
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(help="FILE is a training file, of which this share becomes the suite.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split.", min=0)] = 0,
    group_by: Annotated[
        str | None, typer.Option(help="Field that names the group of a row; groups stay together.")
    ] = None,
    rest: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Where the rows that are left for training go.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make a version of a suite from items, a part of a training file, or the held-out rows of a data set."""

    def work(client: Client, output: Output) -> None:
        if (file is None) == (dataset is None):
            raise CliError("give a file with the items, or a --dataset", ExitCode.USAGE)
        if file is None and (form is not None or fraction is not None):
            raise CliError("--format and --fraction are for a file", ExitCode.USAGE)
        if fraction is None and (group_by is not None or rest is not None):
            raise CliError("--group-by and --rest need --fraction: they are for a training file", ExitCode.USAGE)
        text = "" if file is None else read_text(file)
        body: dict[str, Any] = {}
        if form is not None and file is not None:
            if fraction is not None:
                raise CliError(
                    "--format and --fraction exclude each other: a published set is no training file", ExitCode.USAGE
                )
            body, text = _published(form, text, file)
        body |= {} if settings is None else read_object(settings)
        apply_settings(body, setting or ())
        if scorer is not None:
            body["scorer"] = {"type": scorer} | _same_type(body.get("scorer"), scorer)
        if "scorer" not in body:
            raise CliError("a suite needs a scorer: give --scorer, or one in --settings", ExitCode.USAGE)
        body |= {"name": name, **({"jsonl": text} if dataset is None else {"dataset": dataset})}
        if fraction is not None:
            split = {"fraction": fraction, "seed": seed, "group_by": group_by}
            body["split"] = {key: value for key, value in split.items() if value is not None}
        made = client.post("/v1/eval/suites", body, patient=True)
        left = (
            ""
            if rest is None
            else f"; {_write_rest(client, made['id'], text, rest)} rows are left in {escape(str(rest))}"
        )
        output.result(made, f"[green]{made['id']}[/]  {_size(made)}{left}")

    connected(url, as_json, work)


@app.command()
def create_shipped(
    prefix: Annotated[str, typer.Option(help="In front of the suites' names.")] = "tiny-",
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make the suites that come with Temper: the six skills of models/tiny, 200 problems each that it never saw."""

    def work(client: Client, output: Output) -> None:
        made = []
        for file in sorted(SHIPPED.glob("*.jsonl")):
            body = {**read_object(file.with_suffix(".json")), "name": prefix + file.stem, "jsonl": read_text(file)}
            made.append(client.post("/v1/eval/suites", body, patient=True))
        rows = [[one["id"], _size(one)] for one in made]
        output.table(made, ["suite", ""], rows, empty="This Temper ships no suites.")

    connected(url, as_json, work)


@app.command("list")
def list_suites(
    name: Annotated[
        str | None, typer.Argument(help="Every version of this suite.", show_default="the newest of each")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=1000)] = 100,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The newest version of each suite, or all versions of one."""

    def work(client: Client, output: Output) -> None:
        params: dict[str, str | int] = {"limit": limit} | ({} if name is None else {"name": name})
        answer = client.get("/v1/eval/suites", **params)
        rows = [
            [
                one["id"],
                str(one["items"]),
                one["settings"]["scorer"]["type"],
                _gain(one),
                one["settings"]["description"],
            ]
            for one in answer["data"]
        ]
        columns = ["suite", "items", "scorer", "sees", "description"]
        output.table(answer, columns, rows, empty="No suites yet: make one with `temper eval suites create`.")

    connected(url, as_json, work)


@app.command()
def show(ref: Ref, url: Url = None, as_json: Json = False) -> None:
    """A version: its size, its scorer and its settings."""

    def work(client: Client, output: Output) -> None:
        one = client.get(path("v1", "eval", "suites", ref))
        lines = [f"[bold]{one['id']}[/]  {_size(one)}", f"  digest  {one['digest'][:16]}"]
        lines += [
            f"  {key}  {escape(json.dumps(value, ensure_ascii=False))}"
            for key, value in one["settings"].items()
            if value
        ]
        output.result(one, "\n".join(lines))

    connected(url, as_json, work)


@app.command()
def items(
    ref: Ref,
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=_PAGE)] = 20,
    after: Annotated[int, typer.Option(help="Begin behind this index.", min=-1)] = -1,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Items of a version."""

    def work(client: Client, output: Output) -> None:
        answer = client.get(path("v1", "eval", "suites", ref, "items"), limit=limit, after=after)
        rows = [
            [
                str(one["index"]),
                one["id"],
                one.get("group") or "",
                _asked(one),
                " | ".join(one.get("expected") or ())[:_SHOWN],
            ]
            for one in answer["data"]
        ]
        output.table(answer, ["", "item", "group", "prompt", "expected"], rows, empty="No more items.")

    connected(url, as_json, work)


@app.command()
def delete(ref: Ref, url: Url = None, as_json: Json = False) -> None:
    """Remove a version, or all versions of a suite; results that name them stay."""

    def work(client: Client, output: Output) -> None:
        answer = client.delete(path("v1", "eval", "suites", ref))
        gone = ", ".join(f"{ref.partition('@')[0]}@{number}" for number in answer["versions"])
        output.result(answer, f"removed {gone}")

    connected(url, as_json, work)


def _published(form: str, text: str, file: Path) -> tuple[dict[str, Any], str]:
    """Settings and items of a published set."""
    reader = FORMATS.get(form)
    if reader is None:
        raise CliError(f"--format {form!r} is none of {', '.join(FORMATS)}", ExitCode.USAGE)
    try:
        found = reader(text)
    except InvalidRequest as error:
        raise CliError(f"{file}: {error.message.removeprefix('jsonl: ')}", ExitCode.USAGE) from error
    return copy.deepcopy(dict(found.settings)), found.jsonl


def _same_type(given: Any, scorer: str) -> dict[str, Any]:
    """Settings of a scorer beside its type."""
    if not isinstance(given, dict):
        return {}
    if given.get("type", scorer) != scorer:
        raise CliError(f"--scorer {scorer} contradicts the scorer in the settings, {given['type']}", ExitCode.USAGE)
    return given


def _write_rest(client: Client, suite: str, text: str, target: Path) -> int:
    """Writes the lines of a training file that are not in the suite, and returns how many there are."""
    held: set[int] = set()
    after, more = -1, True
    while more:
        page = client.get(path("v1", "eval", "suites", suite, "items"), limit=_PAGE, after=after)
        held.update(int(one["id"].removeprefix("line-")) for one in page["data"])
        after, more = after + len(page["data"]), page["has_more"]
    left = [line for number, line in enumerate(text.split("\n"), start=1) if line.strip() and number not in held]
    try:
        target.write_text("".join(f"{line}\n" for line in left), encoding="utf-8", newline="\n")
    except OSError as error:
        raise CliError(f"cannot write {target}: {error.strerror}; {suite} was made") from error
    return len(left)


def _size(one: dict[str, Any]) -> str:
    groups = "" if one["clusters"] == one["items"] else f" in {one['clusters']} groups"
    return f"{one['items']} items{groups}, scored by {one['settings']['scorer']['type']}, sees {_gain(one)}"


def _gain(one: dict[str, Any]) -> str:
    """Smallest gain that the suite sees, for people."""
    gain = one.get("smallest_gain")
    return "nothing" if gain is None else f"gains of {100 * gain:.1f} points"


def _asked(item: dict[str, Any]) -> str:
    asked = item.get("prompt") or item.get("messages") or ""
    text = asked if isinstance(asked, str) else str(asked[-1].get("content") or "")
    return text.replace("\n", " ")[:_SHOWN]
