"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None, typer.Option("--url", help="The gateway; also TEMPER_URL.", show_default="http://localhost:8420")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
