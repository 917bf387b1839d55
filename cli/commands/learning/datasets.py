"""`temper dataset`: immutable versions of rows from feedback, the request log and files."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.http.client import Client, path
from cli.job_files import apply_settings, read_object
from cli.options import Json, Url, connected
from cli.output import Output

app = typer.Typer(
    name="dataset", help="Make, list and show data sets, and examples for jobs of them.", no_args_is_help=True
)
_SHOWN = 60
_TOLD = (
    "opinions",
    "requests",
    "without_request",
    "without_text",
    "other_prompt",
    "faulty_lines",
    "duplicates",
    "capped",
)
Ref = Annotated[
    str, typer.Argument(metavar="NAME[@VERSION]", help="A data set, e.g. thumbs (its newest version) or thumbs@2.")
]


class Split(enum.StrEnum):
    """Splits of a data set."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


class Kind(enum.StrEnum):
    """Jobs that learn from examples of a data set."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"
    GRPO = "grpo"


InSplit = Annotated[Split, typer.Option(help="The part of it.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="The data set that gets a new version.")],
    settings: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="feedback, logged, files, filter, split, as the API has them."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One more setting, e.g. filter.min_rating=0.5."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, and tell what there would be.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make a version of a data set from what was said of answers, or what else the settings name."""

    def work(client: Client, output: Output) -> None:
        body: dict[str, Any] = {} if settings is None else read_object(settings)
        apply_settings(body, setting or ())
        made = client.post("/v1/datasets", body | {"name": name, "dry_run": dry_run}, patient=True)
        called = f"[green]{made['id']}[/]" if made["id"] else f"{escape(name)} would have"
        output.result(made, f"{called}  {_rows(made)}\n{_report(made)}")

    connected(url, as_json, work)


@app.command("list")
def list_datasets(
    name: Annotated[
        str | None, typer.Argument(help="Every version of this data set.", show_default="the newest of each")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show data sets."""

    def work(client: Client, output: Output) -> None:
        found: list[dict[str, Any]] = []
        more: dict[str, str] = {} if name is None else {"name": name}
        while True:
            page = client.get("/v1/datasets", limit=1000, **more)
            found += page["data"]
            if not page["has_more"]:
                break
            more["after"] = page["data"][-1]["id"]
        rows = [[one["id"], _rows(one), str(one["report"]["users"])] for one in found]
        output.table(found, ["dataset", "rows", "users"], rows, empty="No data sets.")

    connected(url, as_json, work)


@app.command()
def show(
    dataset: Ref,
    split: InSplit = Split.TRAIN,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most rows.")] = 20,
    after: Annotated[int, typer.Option(help="Begin behind this index.", min=-1)] = -1,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show rows of a data set."""

    def work(client: Client, output: Output) -> None:
        place = path("v1", "datasets", dataset, "rows")
        page = client.get(place, split=split.value, limit=limit, after=after)
        rows = [
            [str(index), _short(row["messages"][-1].get("content")), _short(_answer(row)), _number(row["rating"])]
            for index, row in enumerate(page["data"], after + 1)
        ]
        empty = f"{dataset} has no rows in {split.value}."
        output.table(page["data"], ["", "asked", "answered, or better", "rating"], rows, empty=empty)

    connected(url, as_json, work)


@app.command()
def examples(
    dataset: Ref,
    kind: Annotated[Kind, typer.Argument(help="The kind of job that is to learn from it.")],
    data: Annotated[Path, typer.Argument(help="JSONL for `temper train submit KIND --data`.")],
    split: InSplit = Split.TRAIN,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write examples for a job."""

    def work(client: Client, output: Output) -> None:
        place = path("v1", "datasets", dataset, "examples")
        client.download(place, data, kind=kind.value, split=split.value)
        count = sum(bool(line.strip()) for line in data.read_bytes().split(b"\n"))
        told = "1 example" if count == 1 else f"{count} examples"
        text = f"{told}: temper train submit {kind.value} --data {escape(str(data))} --adapter NAME"
        output.result({"data": str(data), "examples": count}, text)

    connected(url, as_json, work)


@app.command()
def delete(dataset: Ref, url: Url = None, as_json: Json = False) -> None:
    """Remove a version, NAME@VERSION, or all versions of NAME."""

    def work(client: Client, output: Output) -> None:
        gone = client.delete(path("v1", "datasets", dataset))
        output.result(gone, f"{escape(dataset)} is removed: {', '.join(map(str, gone['versions']))}")

    connected(url, as_json, work)


def _rows(dataset: dict[str, Any]) -> str:
    return ", ".join(f"{count} {split}" for split, count in dataset["rows"].items())


def _report(dataset: dict[str, Any]) -> str:
    report = dataset["report"]
    told = [f"{name.replace('_', ' ')} {report[name]}" for name in _TOLD if report[name]]
    if report["mean_rating"] is not None:
        told.append(f"mean rating {report['mean_rating']:.2f}")
    top = [f"{one['user']} {one['rows']}" for one in report["top_users"][:3]]
    unlike = [_outlier(one) for one in report.get("outliers", ())]
    said = [", ".join(told)]
    said += [f"most rows by user: {', '.join(top)}"] if top else []
    said += [f"users unlike the rest: {', '.join(unlike)}"] if unlike else []
    return "; ".join(said)


def _outlier(one: dict[str, Any]) -> str:
    agrees = "" if one["agreement"] is None else f", agrees {one['agreement']:.0%} (z {one['agreement_z']:+.1f})"
    return f"{one['user']} scores {one['score']:+.2f} (z {one['score_z']:+.1f}){agrees} in {one['opinions']}"


def _answer(row: dict[str, Any]) -> str | None:
    if row["better"] is not None:
        return str(row["better"])
    answer = row["answer"] or {}
    return answer.get("content") or json.dumps(answer.get("tool_calls"))


def _number(rating: float | None) -> str:
    return "" if rating is None else f"{rating:+.2f}"


def _short(text: Any) -> str:
    line = " ".join((text if isinstance(text, str) else json.dumps(text)).split())
    return escape(line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…")
