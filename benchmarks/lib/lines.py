"""Results as JSON lines: on standard output as they come, and in a file that keeps what a run before left there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def put_line(line: Mapping[str, Any], out: Path | None) -> None:
    """Prints a result and appends it to ``out``; None: only prints."""
    text = json.dumps(line)
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")
