"""`temper eval`: evaluation of models and adapters."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.commands import suites
from cli.http.client import Client, path
from cli.options import Json, Url, connected
from cli.output import Output

app = typer.Typer(name="eval", help="Evaluate models and adapters.", no_args_is_help=True)
app.add_typer(suites.app)


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


def _part(item: dict[str, Any]) -> str:
    return "whole prompt" if item["exact"] else f"{item['share']:.0%} of its text"
