"""`temper config`: settings as they are read, and whether they can be used."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from pydantic import SecretStr

from cli.options import Json
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import read
from services.common.settings import config_file, read_config_file
from services.common.validation.settings import keys_of

app = typer.Typer(name="config", help="Show and check settings.", no_args_is_help=True)


@app.command()
def show(
    every: Annotated[bool, typer.Option("--all", help="Those that have their defaults, too.")] = False,
    as_json: Json = False,
) -> None:
    """Show the settings that variables and temper.toml change, and where each comes from. Secrets are not shown."""
    # Imported here: other commands need none of it.
    from cli.doctor.checks.settings import SETTINGS

    output = Output(as_json=as_json)
    with guarded(output):
        variables, lines = os.environ, _lines()
        found: dict[str, dict[str, Any]] = {}
        for settings in SETTINGS:
            values = read(settings)
            for name, (key, variable) in zip(settings.model_fields, keys_of(settings).items(), strict=True):
                value = getattr(values, name)
                where = "variable" if variable in variables else "file" if key in lines else "default"
                if where == "default" and name in values.model_fields_set:
                    where = "context"
                secret = isinstance(value, SecretStr)
                shown = "…" if secret and value.get_secret_value() and where != "default" else _text(value)
                if every or where != "default":
                    found.setdefault(key, {"setting": key, "variable": variable, "value": shown, "from": where})
        rows = [[one["setting"], one["value"], one["from"]] for one in found.values()]
        file = config_file()
        if file is not None and not as_json:
            output.err.print(str(file), markup=False, soft_wrap=True)
        output.table(
            list(found.values()), ["SETTING", "VALUE", "FROM"], rows, empty="every setting has its default (--all)"
        )


@app.command()
def check(as_json: Json = False) -> None:
    """Check every setting. Exit status 0: all can be used, 2: some cannot, or have names that nothing reads."""
    # Imported here: other commands need none of it.
    from cli.doctor.checks.settings import unknown, unreadable

    output = Output(as_json=as_json)
    with guarded(output):
        wrong = unreadable()
        nameless = unknown()
        if as_json:
            output.json({"unusable": wrong, "unknown": nameless})
        for text in wrong:
            output.err.print(f"cannot be used: {text}", markup=False, soft_wrap=True)
        for text in nameless:
            output.err.print(f"no setting has this name: {text}", markup=False, soft_wrap=True)
        if wrong or nameless:
            raise typer.Exit(int(ExitCode.USAGE))
        if not as_json:
            output.out.print("every setting can be used")


def _lines() -> dict[str, Any]:
    file = config_file()
    try:
        return {} if file is None else read_config_file(file)
    except ValueError as error:
        raise CliError(str(error), ExitCode.USAGE) from error


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
