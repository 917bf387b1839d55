"""`temper engine`: engines sleep and wake."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import typer

from cli.http.client import Client
from cli.options import Json, Url
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read
from services.common.shutdown import SleepLevel

app = typer.Typer(name="engine", help="Put engines to sleep, and wake them.", no_args_is_help=True)
_PAUSE_SECONDS = 0.5
_COLUMNS = ["engine", "state", "level"]

Engine = Annotated[str | None, typer.Option(help="Id or name of one engine.", show_default="all")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has come to that.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait; exit code 4 after that.", min=0)]


@app.command("list")
def list_engines(url: Url = None, as_json: Json = False) -> None:
    """Engines, and whether they sleep."""
    output = Output(as_json=as_json)
    with guarded(output), Client(url, read(CliSettings)) as client:
        _show(output, client.get("/v1/engine"))


@app.command()
def sleep(
    engine: Engine = None,
    level: Annotated[
        SleepLevel,
        typer.Option(
            help="What is given back: the caches; the weights, too, which wait in host memory; or all, and waking is a "
            "start."
        ),
    ] = "process",
    wait: Wait = True,
    timeout: Timeout = 600.0,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let engines give memory of their devices back: what they answer ends first, a training job goes on when they
    wake, or elsewhere."""
    _bring("sleep", "asleep", {"engine": engine, "level": level}, timeout if wait else None, url, as_json)


@app.command()
def wake(
    engine: Engine = None, wait: Wait = True, timeout: Timeout = 600.0, url: Url = None, as_json: Json = False
) -> None:
    """Have engines that sleep work again."""
    _bring("wake", "awake", {"engine": engine}, timeout if wait else None, url, as_json)


def _bring(
    what: Literal["sleep", "wake"],
    state: Literal["asleep", "awake"],
    chosen: dict[str, str | None],
    seconds: float | None,
    url: str | None,
    as_json: bool,
) -> None:
    output = Output(as_json=as_json)
    with guarded(output), Client(url, read(CliSettings)) as client:
        query = urlencode({name: value for name, value in chosen.items() if value is not None})
        answer = client.post(f"/v1/engine/{what}{'?' if query else ''}{query}")
        until = time.monotonic() + (seconds or 0.0)
        asked = {one["id"] for one in answer["data"]}
        while seconds is not None and any(one["state"] != state for one in answer["data"]):
            if time.monotonic() >= until:
                raise CliError(f"not {state} after {seconds:g} s, it goes on: `temper engine list`", ExitCode.TIMED_OUT)
            time.sleep(_PAUSE_SECONDS)
            answer = client.get("/v1/engine")
            answer["data"] = [one for one in answer["data"] if one["id"] in asked]
        _show(output, answer)


def _show(output: Output, answer: dict[str, Any]) -> None:
    rows = [[one["name"], one["state"].replace("_", " "), one.get("level") or ""] for one in answer["data"]]
    output.table(answer, _COLUMNS, rows, empty="no engines")
