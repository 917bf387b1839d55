"""A `temper up` of the demo's own: in a directory that goes away with it, on a free port."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cli.commands.up import ROOT
from cli.interrupts import undisturbed
from cli.local.ports import claim_ports
from cli.output import CliError, ExitCode

_STOP_SECONDS = 60.0


@contextlib.contextmanager
def running_stack(report: Callable[[str], None], settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Starts everything, yields the gateway's URL, stops everything and removes its data, whatever happens.

    Args:
        report: called with each line that `temper up` writes about its progress.
        settings: environment of its processes, besides ours.

    Raises:
        CliError: it did not get ready; the message has what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="temper-demo-") as directory:
        (port,) = claim_ports(1)
        argv = [sys.executable, "-m", "cli", "up", "--json"]
        argv += ["--port", str(port.number), "--data-dir", f"{directory}/data"]
        # A session of its own: Ctrl-C must reach the demo first, which then stops the stack in order.
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**_environment(), **(settings or {})},
            start_new_session=True,
        )
        lines: collections.deque[str] = collections.deque(maxlen=12)
        reader = threading.Thread(target=_relay, args=(process, lines, report), daemon=True)
        reader.start()
        try:
            yield _url(process, lines)
        finally:
            with undisturbed():
                _stop(process)
                reader.join(5.0)


def _environment() -> dict[str, str]:
    """Ours, without settings of another Temper, which would join the demo to its stores."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TEMPER_")}
    path = os.pathsep.join(part for part in (str(ROOT), kept.get("PYTHONPATH", "")) if part)
    return {**kept, "PYTHONPATH": path}


def _url(process: subprocess.Popen[str], lines: collections.deque[str]) -> str:
    ready = process.stdout.readline() if process.stdout is not None else ""
    if not ready:
        said = " | ".join(lines) or f"it ended with status {process.wait()}"
        raise CliError(f"Temper did not start: {said}", ExitCode.UNREACHABLE)
    return str(json.loads(ready)["url"])


def _relay(process: subprocess.Popen[str], lines: collections.deque[str], report: Callable[[str], None]) -> None:
    for line in process.stderr or ():
        lines.append(line.strip())
        report(line.strip())


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def report_path(directory: Path, suffix: str, *, name: str = "demo-report") -> Path:
    """{name}.{suffix} in a directory that exists.

    Raises:
        CliError: it does not, or nothing can be written there.
    """
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise CliError(f"{directory} is not a directory that can be written to: choose another with --output")
    return directory / f"{name}.{suffix}"
