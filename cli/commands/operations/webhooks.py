"""`temper webhooks`: what was sent to webhooks, and once more."""

from __future__ import annotations

import datetime
import enum
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.http.client import Client, path
from cli.options import Json, Url, connected
from cli.output import Output

app = typer.Typer(name="webhooks", help="Look at what was sent to webhooks, and send it again.", no_args_is_help=True)
Id = Annotated[str, typer.Argument(metavar="DELIVERY", help="Its id, as `temper webhooks list` shows it.")]


class InState(enum.StrEnum):
    """States of a delivery."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@app.command("list")
def list_deliveries(
    state: Annotated[InState | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(help="How many to list.", min=1, max=1000)] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Newest deliveries first."""

    def work(client: Client, output: Output) -> None:
        wanted = {} if state is None else {"state": state.value}
        answer = client.get("/v1/webhook_deliveries", limit=limit, **wanted)
        rows = [[one["id"], one["type"], one["url"], one["state"], str(one["attempts"])] for one in answer["data"]]
        columns = ["delivery", "event", "url", "state", "attempts"]
        output.table(answer, columns, rows, empty="Nothing was sent: TEMPER_WEBHOOK_URLS says where to.")

    connected(url, as_json, work)


@app.command()
def show(delivery: Id, url: Url = None, as_json: Json = False) -> None:
    """One delivery with its attempts."""

    def work(client: Client, output: Output) -> None:
        one = client.get(path("v1", "webhook_deliveries", delivery))
        output.result(one, _described(one))

    connected(url, as_json, work)


@app.command()
def resend(delivery: Id, url: Url = None, as_json: Json = False) -> None:
    """Send an event once more, as the same event."""

    def work(client: Client, output: Output) -> None:
        one = client.post(path("v1", "webhook_deliveries", delivery, "resend"))
        output.result(one, f"{delivery} is {one['state']}; see: temper webhooks show {delivery}")

    connected(url, as_json, work)


def _described(one: dict[str, Any]) -> str:
    lines = [f"[bold]{one['id']}[/]  {escape(one['type'])} → {escape(one['url'])}  {one['state']}"]
    for attempt in one["log"]:
        at = datetime.datetime.fromtimestamp(attempt["at"]).strftime("%Y-%m-%d %H:%M:%S")
        said = attempt.get("error") or f"status {attempt.get('status')}"
        lines.append(f"  {at}  {attempt['seconds']:.2f} s  {escape(said)}")
    if one.get("next_at"):
        at = datetime.datetime.fromtimestamp(one["next_at"]).strftime("%Y-%m-%d %H:%M:%S")
        lines.append(f"  next at {at}")
    return "\n".join(lines)
