"""`temper sessions`: what engines keep of conversations, saved, carried elsewhere and deleted."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.markup import escape

from cli.http.client import Client, path
from cli.http.transfers import moving, size_of
from cli.options import Json, Url, connected
from cli.output import Output

app = typer.Typer(name="sessions", help="List, save, move and delete sessions.", no_args_is_help=True)

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="As requests say it: session_id.")]


@app.command("list")
def list_sessions(
    limit: Annotated[int, typer.Option(help="How many to list.", min=1, max=1000)] = 100,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """What is kept of your sessions, last used first."""

    def work(client: Client, output: Output) -> None:
        answer = client.get("/v1/sessions", limit=limit)
        rows = [
            [one["id"], str(one["tokens"]), _sizes(one), "yes" if one["saved"] else "", _ago(one["used_at"])]
            for one in answer["data"]
        ]
        output.table(
            answer,
            ["session", "tokens", "kept", "saved", "used"],
            rows,
            empty="No sessions: requests with a session_id have one.",
        )
        if answer["has_more"]:
            output.err.print(f"[dim]there are more than {limit}: --limit[/]")

    connected(url, as_json, work)


@app.command()
def show(session: SessionId, url: Url = None, as_json: Json = False) -> None:
    """What is kept of one session, and where."""

    def work(client: Client, output: Output) -> None:
        one = client.get(path("v1", "sessions", session))
        output.result(one, _describe(one))

    connected(url, as_json, work)


@app.command()
def save(session: SessionId, url: Url = None, as_json: Json = False) -> None:
    """Write it to disk and object store, so that it outlives its engine."""

    def work(client: Client, output: Output) -> None:
        one = client.post(path("v1", "sessions", session, "save"), patient=True)
        output.result(one, f"[green]saved[/] {escape(one['id'])}: {one['tokens']} tokens, {escape(_sizes(one))}")

    connected(url, as_json, work)


@app.command()
def export(
    session: SessionId,
    file: Annotated[Path, typer.Argument(help="Where it goes.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write a session to one file, for another Temper of the same model."""

    def work(client: Client, output: Output) -> None:
        with moving(output, "exporting", None) as moved:
            client.download(path("v1", "sessions", session, "export"), file, on_block=moved)
        size = file.stat().st_size
        text = f"{escape(session)} → {escape(str(file))}, {decimal(size)}"
        output.result({"id": session, "file": str(file), "bytes": size}, text)

    connected(url, as_json, work)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An exported session.")],
    session: SessionId,
    key_id: Annotated[
        str | None, typer.Option(help="Id of the API key whose session it becomes; default: yours.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Read such a file. With API keys it takes one with the scope admin: what is in it is believed."""

    def work(client: Client, output: Output) -> None:
        size = size_of(file)
        params = {} if key_id is None else {"key_id": key_id}
        with moving(output, "importing", size) as moved:
            one = client.send_file("PUT", path("v1", "sessions", session, "import"), file, on_block=moved, **params)
        output.result(one, f"[green]imported[/] {escape(one['id'])}: {one['tokens']} tokens, {escape(_sizes(one))}")

    connected(url, as_json, work)


@app.command()
def delete(session: SessionId, url: Url = None, as_json: Json = False) -> None:
    """Forget it on all engines, and what only it has use for."""

    def work(client: Client, output: Output) -> None:
        gone = client.delete(path("v1", "sessions", session))
        output.result(gone, f"{escape(gone['id'])} deleted")

    connected(url, as_json, work)


def _sizes(session: dict[str, Any]) -> str:
    return ", ".join(f"{tier} {decimal(size)}" for tier, size in session["bytes"].items() if size) or "nothing"


def _when(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _ago(seconds: int) -> str:
    passed = max(0, int(time.time()) - seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= size:
            return f"{passed // size} {unit} ago"
    return f"{passed} s ago"


def _describe(session: dict[str, Any]) -> str:
    lines = [
        f"[bold]{escape(session['id'])}[/]  {session['tokens']} tokens",
        f"  kept      {escape(_sizes(session))}",
        f"  saved     {'yes' if session['saved'] else 'no'}",
        f"  requests  {session['requests']}",
        f"  adapter   {escape(session['adapter'] or 'base model')}",
        f"  engine    {escape(session['engine'])}",
        f"  used      {_when(session['used_at'])} ({_ago(session['used_at'])})",
        f"  until     {_when(session['expires_at'])}, then like everything else",
    ]
    return "\n".join(lines)
