"""Work on files that needs torch: a process of its own, `python -m services.adapter_tools`, behind a progress bar.

The command line itself loads no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from cli.local.process import die_with_parent
from cli.output import CliError, ExitCode, Output

MODULE = "services.adapter_tools"
_STOP_SECONDS = 30.0


def run_tool(output: Output, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs the tool to its end and returns its result.

    Raises:
        CliError: in the tool's words; nothing is left of what it had begun to write.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is passed on as SIGTERM, once
        preexec_fn=die_with_parent(os.getpid()),
    )
    with _ended(process), _bar(output) as progress:
        task = progress.add_task("starting", total=None)
        for event in _events(process):
            kind = event.pop("event")
            if kind == "progress":
                total = event["total"] or None
                progress.update(task, description=event["stage"], completed=event["done"], total=total)
            elif kind == "result":
                return event
            else:
                code = ExitCode.USAGE if event.get("code") == "invalid_request" else ExitCode.FAILED
                raise CliError(str(event["message"]), code, error=event)
    raise CliError(f"{MODULE} ended with status {process.returncode} and said nothing")


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in process.stdout or ():
        try:
            event = json.loads(line)
        except ValueError as error:
            raise CliError(f"{MODULE} wrote a line that is no event: {line[:80]!r}") from error
        yield event


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Waits for the process, which is stopped first if the block is left early."""
    try:
        yield
    except BaseException:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        raise
    finally:
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _bar(output: Output) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=output.err,
        disable=output.as_json or not output.err.is_terminal,
    )
