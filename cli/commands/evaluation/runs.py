"""`temper eval`: suites on targets, and their results as tables."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cli.commands.evaluation import harness, suites
from cli.commands.evaluation.comparison_plot import save_comparison
from cli.http.client import Client, path
from cli.http.job_events import watch
from cli.job_files import apply_settings
from cli.options import Json, Plot, Timeout, Url, Wait, connected
from cli.output import CliError, ExitCode, Output

app = typer.Typer(name="eval", help="Evaluate models and adapters.", no_args_is_help=True)
app.add_typer(suites.app)
app.command("export")(harness.export)
app.command("import")(harness.import_results)

RunId = Annotated[str, typer.Argument(metavar="EVALUATION", help="An id as `temper eval run` prints it.")]


@app.command()
def run(
    suite: Annotated[list[str], typer.Argument(metavar="SUITE...", help="Suites, e.g. sums or sums@2.")],
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TARGET",
            help='"base", an adapter (its current version), NAME@VERSION, or MODEL@URL of another server; repeatable.',
            show_default="base",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Answers of each item.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the samples.", min=0)] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One more setting, e.g. sampling.max_tokens=16."),
    ] = None,
    wait: Wait = False,
    timeout: Timeout = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Run suites on targets and compare these in pairs."""

    def work(client: Client, output: Output) -> None:
        body: dict[str, Any] = {"suites": suite}
        if target:
            body["targets"] = [_target(one) for one in target]
        if samples is not None:
            body["sampling"] = {"samples": samples}
        if seed is not None:
            body["seed"] = seed
        apply_settings(body, setting or ())
        made = client.post("/v1/evaluations", body)
        if not wait:
            output.result(made, f"{made['id']} queued; look at it with: temper eval show {made['id']}")
            return
        watch(client, output, made["id"], timeout=timeout, called="evaluation")
        _show(output, client.get(path("v1", "evaluations", made["id"])))

    connected(url, as_json, work)


@app.command()
def show(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """A run: its scores with intervals, and its targets compared."""

    def work(client: Client, output: Output) -> None:
        _show(output, client.get(path("v1", "evaluations", run)))

    connected(url, as_json, work)


@app.command("list")
def list_runs(
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME@VERSION", help="Only runs that this version is a target of.")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=100)] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The newest runs, or those of one version."""

    def work(client: Client, output: Output) -> None:
        where = "/v1/evaluations"
        if adapter is not None:
            name, at, number = adapter.partition("@")
            if not at:
                raise CliError(f"--adapter needs a version, as in {name}@1", ExitCode.USAGE)
            where = path("v1", "adapters", name, "versions", number, "evaluations")
        answer = client.get(where, limit=limit)
        rows = [
            [
                one["id"],
                one["state"],
                _done(one),
                " ".join(suite["suite"] for suite in one["suites"] or ()),
                " ".join(known["name"] for known in one["targets"] or ()),
                _time(one["created_at"]),
            ]
            for one in answer["data"]
        ]
        columns = ["evaluation", "state", "items", "suites", "targets", "created"]
        output.table(answer, columns, rows, empty="No evaluations yet: run one with `temper eval run`.")

    connected(url, as_json, work)


@app.command()
def compare(
    of: Annotated[
        list[str], typer.Argument(metavar="EVALUATION|NAME@VERSION...", help="All targets of a run, or a version.")
    ],
    target: Annotated[list[str] | None, typer.Option(help="Only targets of this name; repeatable.")] = None,
    plot: Plot = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Up to eight targets in one table, each compared with the first one."""

    def work(client: Client, output: Output) -> None:
        found = client.get("/v1/evaluations/compare", of=of, target=target or ())
        labels = [entry["label"] for entry in found["entries"]]
        rows = [_side(one, labels[one["entry"]]) for one in found["data"]]
        if plot is not None:
            save_comparison(found, plot)
        columns = ["suite", "target", "score", "95 % interval", "invalid", "gain", "95 % interval", "p"]
        output.table(found, columns, rows, empty="They have no suites.")

    connected(url, as_json, work)


@app.command()
def contamination(
    suite: suites.Ref,
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER[@VERSION]", help="Its current version, or this one.")],
    limit: Annotated[int, typer.Option(help="How many contaminated items to list.", min=0, max=1000)] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """What of a suite a version was trained on, itself or any version that it came of."""

    def work(client: Client, output: Output) -> None:
        found = client.get(path("v1", "eval", "suites", suite, "contamination"), adapter=adapter, limit=limit)
        lines = [
            f"[bold]{found['contaminated']}[/] of {found['items']} items of {found['suite']} occur in the training "
            f"data of {found['adapter']} (jobs: {found['jobs']}); {found['exact']} of them as a whole prompt"
        ]
        lines += [f"  {one['index']:>5}  {escape(one['id'])}  {_part(one)}" for one in found["data"]]
        if found["unknown"]:
            lines.append(f"[yellow]not known what these were trained on:[/] {', '.join(found['unknown'])}")
        output.result(found, "\n".join(lines))

    connected(url, as_json, work)


def _target(text: str) -> str | dict[str, str]:
    """A target of the command line; of another server MODEL@URL."""
    model, at, url = text.partition("@")
    return {"model": model, "url": url} if at and "://" in url else text


def _show(output: Output, one: dict[str, Any]) -> None:
    if output.as_json:
        output.json(one)
        return
    colour = {"succeeded": "green", "failed": "red", "cancelled": "yellow"}.get(one["state"], "cyan")
    reason = f"  {escape(one['reason'])}" if one["reason"] else ""
    if one.get("imported"):
        reason += f"  [yellow]imported from {escape(one['imported']['program'])}[/]"
    output.out.print(f"[bold]{one['id']}[/]  [{colour}]{one['state']}[/]  {_done(one)} items{reason}", soft_wrap=True)
    better = {suite["suite"]: suite["better"] for suite in one["suites"] or ()}
    if one["summaries"]:
        rows = [_scores(summary, better[summary["suite"]]) for summary in one["summaries"]]
        _table(output, ["suite", "target", "score", "95 % interval", "items", "invalid", "cut off", "tokens"], rows)
    for gate in one.get("gates") or ():
        verdict = "[green]met[/]" if gate["passed"] else "[red]not met[/]"
        output.out.print(f"{gate['gate']} of {one['job']} against {gate['against']}: {verdict}", soft_wrap=True)
        _table(
            output,
            ["condition", "suite", "gain", "wanted", "p", "alpha", ""],
            [_condition(c) for c in gate["conditions"]],
        )
        if (distance := gate.get("divergence")) is not None:
            output.out.print(_divergence(distance), soft_wrap=True)
    if one["comparisons"]:
        rows = [_pair(pair) for pair in one["comparisons"]]
        _table(output, ["suite", "compared", "gain", "95 % interval", "p", "better", "worse", "sees"], rows)


def _scores(summary: dict[str, Any], better: str) -> list[str]:
    score = f"{summary['mean']:.4f}" if better == "lower" else f"{100 * summary['mean']:.1f} %"
    return [
        summary["suite"],
        summary["target"],
        score,
        _interval(summary["interval"], better),
        str(summary["items"]),
        str(summary["invalid"]),
        str(summary["finish_reasons"].get("length", 0)),
        f"{summary['tokens_mean']:.1f}",
    ]


def _pair(pair: dict[str, Any]) -> list[str]:
    return [
        pair["suite"],
        f"{pair['first']} → {pair['second']}",
        f"{pair['gain']:+.4f}",
        _interval(pair["interval"], "lower"),
        f"{pair['p']:.2g}",
        str(pair["better"]),
        str(pair["worse"]),
        "" if pair["sees"] is None else f"{pair['sees']:.4f}",
    ]


def _divergence(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    verdict = "[green]shown[/]" if one["passed"] else "[red]not shown[/]"
    return (
        f"KL {one['kl']:.3g} a token ({low:.3g} to {high:.3g}) on {one['tokens']} tokens of {one['prompts']} answers, "
        f"at most {one['max_kl']:g}: {verdict}"
    )


def _condition(one: dict[str, Any]) -> list[str]:
    return [
        one["kind"].replace("_", " "),
        one["suite"],
        f"{one['gain']:+.4f}",
        f"> {one['at_least']:+g}",
        f"{one['p']:.2g}",
        f"{one['alpha']:.3g}",
        "shown" if one["passed"] else "not shown",
    ]


def _side(one: dict[str, Any], label: str) -> list[str]:
    score = f"{one['mean']:.4f}" if one["better"] == "lower" else f"{100 * one['mean']:.1f} %"
    cells = [one["suite"], label, score, _interval(one["interval"], one["better"]), str(one["invalid"])]
    pair = one["with_first"]
    if pair is None:
        return [*cells, "", "", ""]
    return [*cells, f"{pair['gain']:+.4f}", _interval(pair["interval"], "lower"), f"{pair['p']:.2g}"]


def _interval(bounds: dict[str, Any] | None, better: str) -> str:
    if bounds is None:
        return ""
    if better == "lower":
        return f"{bounds['low']:+.4f} to {bounds['high']:+.4f}"
    return f"{100 * bounds['low']:.1f} to {100 * bounds['high']:.1f} %"


def _table(output: Output, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    output.out.print(table)


def _done(one: dict[str, Any]) -> str:
    progress = one["progress"]
    return "" if progress is None else f"{progress['step']}/{progress['total_steps']}"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _part(item: dict[str, Any]) -> str:
    return "whole prompt" if item["exact"] else f"{item['share']:.0%} of its text"
