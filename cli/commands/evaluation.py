"""`temper eval`: evaluation of models and adapters."""

from __future__ import annotations

import typer

from cli.commands import suites

app = typer.Typer(name="eval", help="Evaluate models and adapters.", no_args_is_help=True)
app.add_typer(suites.app)
