"""Work that needs torch: a process of its own behind a progress bar, by default `python -m services.adapter_tools`.

The command line itself loads no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cli.local.process import die_with_parent
from cli.output import CliError, ExitCode, Output

MODULE = "services.adapter_tools"
Amount: TypeAlias = Literal["bytes", "seconds", "count"]
_STOP_SECONDS = 30.0
_LAST_SECONDS = 5.0


def run_tool(
    output: Output,
    arguments: Sequence[str],
    *,
    module: str = MODULE,
    env: Mapping[str, str] | None = None,
    amount: Amount = "bytes",
) -> dict[str, Any]:
    """Runs the tool to its end and returns its result.

    Args:
        env: its environment; None: this process' own.
        amount: what progress is told in.

    Raises:
        CliError: in the tool's words; nothing is left of what it had begun to write.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        env=env,
        text=True,
        start_new_session=True,  # Ctrl-C is passed on as SIGTERM, once
        preexec_fn=die_with_parent(os.getpid()),
    )
    with _ended(process), _bar(output, amount) as progress:
        task = progress.add_task("starting", total=None)
        for event in _events(process, module):
            kind = event.pop("event")
            if kind == "progress":
                total = event["total"] or None
                progress.update(task, description=event["stage"], completed=event["done"], total=total)
                if total is None:
                    progress.tasks[task].total = None  # which update() leaves as the last stage had it
            elif kind == "result":
                return event
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_SECONDS)  # it ends by itself: a signal now would be told on its standard error
                code = ExitCode.USAGE if event.get("code") == "invalid_request" else ExitCode.FAILED
                raise CliError(str(event["message"]), code, error=event)
    raise CliError(f"{module} ended with status {process.returncode} and said nothing")


def _events(process: subprocess.Popen[str], module: str) -> Iterator[dict[str, Any]]:
    for line in process.stdout or ():
        try:
            event = json.loads(line)
        except ValueError as error:
            raise CliError(f"{module} wrote a line that is no event: {line[:80]!r}") from error
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


def _bar(output: Output, amount: Amount) -> Progress:
    columns: dict[Amount, tuple[ProgressColumn, ...]] = {
        "bytes": (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()),
        "seconds": (TimeElapsedColumn(),),
        "count": (MofNCompleteColumn(), TimeRemainingColumn()),
    }
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *columns[amount],
        console=output.err,
        disable=output.as_json or not output.err.is_terminal,
    )
