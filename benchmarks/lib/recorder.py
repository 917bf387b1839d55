"""Results of benchmarks: figures of a sweep, on disk after each, whatever becomes of the process; and JSON lines, on
standard output and in a file that keeps what a run before left there."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.environment import environment


class Recorder:
    """The rows of a result. The file is whole at any time.

    Args:
        path: None: nothing is written.
        resume: go on with what the file has.
    """

    def __init__(self, path: Path | None, *, resume: bool = False) -> None:
        self._path = path
        self._all: dict[str, Any]
        if resume and path is not None and path.exists():
            self._all = json.loads(path.read_text())
        else:
            self._all = {"environment": environment(), "rows": []}
        self.rows: list[dict[str, Any]] = self._all["rows"]

    def done(self, key: Mapping[str, Any]) -> bool:
        """True if there is a row with these entries."""
        return any(all(name in row and row[name] == value for name, value in key.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write()

    def note(self, **facts: Any) -> None:
        """Facts that stand beside the rows."""
        self._all |= facts
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._all, indent=1))
        part.replace(self._path)


class Clock:
    """Rest of the seconds that a sweep may measure for."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def carry_on_or_start_again(module: str) -> None:
    """A kernel that died takes the CUDA context with it: then the process starts again with --resume, behind it.

    Args:
        module: the one that was started; it takes --resume.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        again = [argument for argument in sys.argv[1:] if argument != "--resume"] + ["--resume"]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, *again])


def put_line(line: Mapping[str, Any], out: Path | None) -> None:
    """Prints a result and appends it to ``out``; None: only prints."""
    text = json.dumps(line)
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")
