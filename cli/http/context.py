"""Context of every command that talks to a gateway."""

from __future__ import annotations

from collections.abc import Callable

from cli.http.client import Client
from cli.output import Output, guarded
from cli.settings import CliSettings


def connected(url: str | None, as_json: bool, work: Callable[[Client, Output], None]) -> None:
    """Runs one command's work with a client and its output."""
    output = Output(as_json=as_json)
    with guarded(output), Client(url, CliSettings()) as client:
        work(client, output)
