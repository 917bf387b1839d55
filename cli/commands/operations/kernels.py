"""`temper kernels`: compiled GPU kernels of one engine, for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cli.local.external_tool import run_tool
from cli.options import Json
from cli.output import Output, guarded
from cli.settings import inherited_environment

app = typer.Typer(name="kernels", help="Pack compiled GPU kernels.", no_args_is_help=True)


@app.callback()
def kernels() -> None:
    """Pack compiled GPU kernels."""


@app.command()
def pack(
    destination: Annotated[Path, typer.Argument(help="File of the archive, or a directory that gets it.")],
    card: Annotated[
        str | None, typer.Option(help="Class of cards, e.g. sm90.", show_default="the only one in TEMPER_CACHE_DIR")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pack the kernels that engines have compiled here, for first starts on cards of the same class elsewhere
    (TEMPER_KERNEL_ARCHIVES)."""
    output = Output(as_json=as_json)
    with guarded(output):
        env = {"TEMPER_LOG_LEVEL": "warning"} | inherited_environment()
        arguments = ["pack-kernels", str(destination.absolute()), *([] if card is None else [card])]
        found = run_tool(output, arguments, module="services.pod", env=env, amount="count")
        size = f"{found['bytes'] / 2**20:.1f} MiB"
        what = f"{found['kernels']} kernels for sm{found['arch']}, Triton {found['triton']}, {size}"
        output.result(found, f"{escape(found['file'])}: {what}")
