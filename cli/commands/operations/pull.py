"""`temper pull`: fetches a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cli.local.model_directory import UNCHECKED, place_of, pull, source_of
from cli.options import Json
from cli.output import CliError, ExitCode, Output, guarded


def pull_model(
    source: Annotated[
        str,
        typer.Argument(help="organisation/name of the hub, with @revision if it is not main, or s3://bucket/prefix."),
    ],
    directory: Annotated[
        Path | None,
        typer.Option(help="Where it goes.", show_default="models in TEMPER_CACHE_DIR, found by --model SOURCE"),
    ] = None,
    digest: Annotated[
        str,
        typer.Option(
            help="What an earlier pull printed of a good copy; any other is refused.", envvar="TEMPER_MODEL_DIGEST"
        ),
    ] = UNCHECKED,
    as_json: Json = False,
) -> None:
    """Fetch a model into a directory: several files at a time, resumed where it stopped, checked against the source."""
    output = Output(as_json=as_json)
    with guarded(output):
        found = source_of(source)
        if found is None:
            raise CliError(
                f"{source!r} is a directory, or no source: name organisation/name, hf://… or s3://…", ExitCode.USAGE
            )
        result = pull(output, found, directory or place_of(found), digest)
        output.result(result, f"{escape(result['directory'])} has the digest {result['digest']}")
