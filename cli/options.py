"""Options that several commands share, and the connection of those that talk to a gateway."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated

import typer

from cli.http.client import Client
from cli.output import Output, guarded
from cli.settings import CliSettings

Url = Annotated[
    str | None, typer.Option("--url", help="The gateway; also TEMPER_URL.", show_default="http://localhost:8420")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Device(enum.StrEnum):
    """Device that the engine computes on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(enum.StrEnum):
    """Element type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def connected(url: str | None, as_json: bool, work: Callable[[Client, Output], None]) -> None:
    """Runs one command's work with a client and its output."""
    output = Output(as_json=as_json)
    with guarded(output), Client(url, CliSettings()) as client:
        work(client, output)
