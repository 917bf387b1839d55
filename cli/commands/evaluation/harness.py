"""`temper eval export|import`: results as files of lm-evaluation-harness."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.http.client import Client, path
from cli.job_files import read_object, read_text
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output

_PAGE = 1000
_RESULTS = re.compile(r"results_(?P<date>.+)\.json")


def export(
    run: Annotated[str, typer.Argument(metavar="EVALUATION", help="A run that has ended.")],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the files go.")],
    target: Annotated[str | None, typer.Option(help="A target of the run.", show_default="the first one")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write a run's results of one target as lm-evaluation-harness writes them: results_*.json and samples_*.jsonl."""

    def work(client: Client, output: Output) -> None:
        chosen = {} if target is None else {"target": target}
        results = client.get(path("v1", "evaluations", run, "harness"), **chosen)
        place = directory / re.sub(r"[^A-Za-z0-9._-]", "_", results["model_name_sanitized"])
        files = []
        for name, config in results["configs"].items():
            rows: list[Any] = []
            more = True
            while more:
                page = client.get(
                    path("v1", "evaluations", run, "harness", "samples"),
                    suite=config["metadata"]["suite"],
                    limit=_PAGE,
                    after=rows[-1]["doc_id"] if rows else -1,
                    **chosen,
                )
                rows += page["data"]
                more = page["has_more"]
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            files.append(_write(place / f"samples_{name}_{run}.jsonl", lines))
        files.append(_write(place / f"results_{run}.json", json.dumps(results, ensure_ascii=False, indent=2)))
        output.result({"files": files}, "\n".join(escape(file) for file in files))

    connected(url, as_json, work)


def import_results(
    results: Annotated[
        Path,
        typer.Argument(metavar="results_DATE.json", help="As the harness wrote it, with --log_samples, in its place."),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=METRIC,FILTER", help="Read this metric of a task, not its first one; repeatable."),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Keep results of lm-evaluation-harness as an evaluation, marked as imported."""

    def work(client: Client, output: Output) -> None:
        body = {
            "results": read_object(results),
            "samples": {task: read_text(file) for task, file in _samples(results).items()},
        }
        if metric:
            body["metrics"] = dict(_metric(one) for one in metric)
        made = client.post("/v1/evaluations/import", body, patient=True)
        rows = (f"{one['suite']}  {one['mean']:.4f} of {one['items']} items" for one in made["summaries"])
        output.result(made, "\n".join([f"[green]{made['id']}[/]  imported", *(f"  {escape(row)}" for row in rows)]))

    connected(url, as_json, work)


def _samples(results: Path) -> dict[str, Path]:
    """Files of samples by task: those that the harness wrote together with the results."""
    match = _RESULTS.fullmatch(results.name)
    if match is None:
        raise CliError(f"{results}: its name must be results_DATE.json, as the harness has it", ExitCode.USAGE)
    found = {}
    for file in sorted(results.parent.glob("samples_*.jsonl")):
        task = file.name.removeprefix("samples_").removesuffix(f"_{match['date']}.jsonl")
        if f"samples_{task}_{match['date']}.jsonl" == file.name:
            found[task] = file
    if not found:
        raise CliError(
            f"{results.parent} has no samples_TASK_{match['date']}.jsonl: run the harness with --log_samples, because "
            "every document counts",
            ExitCode.USAGE,
        )
    return found


def _metric(text: str) -> tuple[str, str]:
    task, equals, name = text.partition("=")
    if not equals or not task or not name:
        raise CliError(f"--metric {text!r} is not TASK=METRIC,FILTER", ExitCode.USAGE)
    return task, name


def _write(file: Path, text: str) -> str:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from error
    return str(file)
