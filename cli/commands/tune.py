"""`temper tune`: measures kernels on this machine's GPU, for the engine's next start."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.local.external_tool import run_tool
from cli.local.model_directory import model_directory
from cli.options import Json, Model
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import inherited_environment


def tune(
    model: Model = None,
    quantization: Annotated[
        str | None, typer.Option(help="As the engine will have it.", envvar="TEMPER_QUANTIZATION", show_default="auto")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Longest search.", min=5, max=600, envvar="TEMPER_TUNE_SECONDS", show_default="60"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest kernels for this machine's GPU, which the engine uses from its next start on."""
    output = Output(as_json=as_json)
    with guarded(output):
        directory = model_directory(model, output)
        if not (directory / "config.json").is_file():
            raise CliError(f"{directory} is not a checkpoint directory: name one with --model", ExitCode.USAGE)
        env = {"TEMPER_LOG_LEVEL": "warning"} | inherited_environment()
        env["TEMPER_MODEL"] = str(directory.absolute())
        if quantization is not None:
            env["TEMPER_QUANTIZATION"] = quantization
        if seconds is not None:
            env["TEMPER_TUNE_SECONDS"] = str(seconds)
        _show(output, run_tool(output, ["tune"], module="services.pod", env=env, amount="seconds"))


def _show(output: Output, result: dict[str, Any]) -> None:
    if output.as_json:
        output.json(result)
        return
    rows = [
        [str(band["rows"]), f"{band['microseconds']:,.0f} µs", f"{band['gain']:.1%}" if band["gain"] else "-"]
        for band in result["bands"]
    ]
    output.table(
        result["bands"], ["REQUESTS", "STEP", "GAIN"], rows, empty="no configuration is faster than the built-in table"
    )
    kept = "could not be kept: see above"
    if result["file"]:
        kept = f"kept in {result['file']}, used from the next start on"
    output.out.print(f"{result['candidates']} candidates in {result['seconds']:.0f} s; {kept}", soft_wrap=True)
