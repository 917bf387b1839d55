"""`temper environments`: servers of environments that agents are trained in."""

from __future__ import annotations

import enum
import os
import sys
from typing import Annotated

import typer

from cli.options import Host

app = typer.Typer(name="environments", help="Environments that agents are trained in.", no_args_is_help=True)


class Shipped(enum.StrEnum):
    """Environments of our own."""

    GUESS = "guess"
    CALCULATOR = "calculator"


@app.callback()
def environments() -> None:
    """Environments that agents are trained in."""


@app.command()
def serve(
    name: Annotated[Shipped, typer.Argument(help="guess: a text game; calculator: one tool and a hidden memory.")],
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8430,
    sessions: Annotated[int, typer.Option(help="Connections at once, each with its environment.", min=1)] = 256,
) -> None:
    """Serve an environment by OpenEnv's protocol, in place of this process, until Ctrl-C.

    Jobs may use it once the engine's TEMPER_REWARD_WEBHOOKS lists its address.
    """
    command = [sys.executable, "-m", "services.environments", name.value]
    os.execv(sys.executable, [*command, "--host", host, "--port", str(port), "--sessions", str(sessions)])
