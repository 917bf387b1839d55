"""Following a job: a live progress bar for people, one JSON line an event for machines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cli.http.client import Client, parse_json, path
from cli.output import CliError, ExitCode, Output

TERMINAL = ("succeeded", "failed", "cancelled")
_PATIENCE = 60.0
"""Seconds that a watched server may be away (a restart) before the watch gives up."""
_SHOWN = (
    "loss",
    "round",
    "reward_mean",
    "eval_reward",
    "margin",
    "accuracy",
    "kl",
    "divergence",
    "eval_divergence",
    "eval_loss",
    "token_accuracy",
    "acceptance",
    "eval_acceptance",
    "grad_norm",
    "tokens_per_second",
    "gate_items_done",
    "gate_items",
    "merge_error_mean",
    "merge_error_max",
)


@dataclass(frozen=True, slots=True)
class Watched:
    """One event of a job, as the server tells it."""

    id: str
    kind: str
    data: dict[str, Any]


def follow(client: Client, job_id: str, *, timeout: float | None) -> Iterator[Watched]:
    """All events of a job from the first on, until it has ended; reconnects where it left off.

    Raises:
        CliError: no such job, the server stayed away, or the timeout passed.
    """
    last_id: str | None = None
    deadline = None if timeout is None else time.monotonic() + timeout
    away_since: float | None = None
    while True:
        try:
            events = client.events(
                "GET",
                path("v1", "train", "jobs", job_id, "events"),
                last_event_id=last_id,
                patience=None if deadline is None else max(0.1, deadline - time.monotonic()),
                on_silence=lambda: _check_time(deadline, job_id),
            )
            for event in events:
                away_since = None
                last_id = event.id or last_id
                body = parse_json(event.data)
                if event.event == "error":
                    error = body.get("error", {})
                    raise CliError(str(error.get("message")), ExitCode.UNREACHABLE, error=error)
                watched = Watched(event.id, event.event, body.get("data", {}))
                yield watched
                if watched.kind == "state" and watched.data.get("state") in TERMINAL:
                    return
                _check_time(deadline, job_id)
            if client.get(path("v1", "train", "jobs", job_id))["state"] in TERMINAL:
                return
        except CliError as error:
            away_since = time.monotonic() if away_since is None else away_since
            if error.code is not ExitCode.UNREACHABLE or time.monotonic() - away_since > _PATIENCE:
                raise
        _check_time(deadline, job_id)
        time.sleep(0.5)


def _check_time(deadline: float | None, job_id: str) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise CliError(f"{job_id} has not ended in time; it goes on without us", ExitCode.TIMED_OUT)


def watch(
    client: Client, output: Output, job_id: str, *, timeout: float | None = None, called: str = "job"
) -> dict[str, Any]:
    """Shows a job until it has ended, and returns it.

    Args:
        called: the word for it in an error.

    Raises:
        CliError: it failed or was cancelled (exit code 1), or it could not be followed.
    """
    if output.as_json:
        for event in follow(client, job_id, timeout=timeout):
            output.json({"id": event.id, "kind": event.kind, "data": event.data}, line=True)
    else:
        with _Display(output, job_id) as display:
            for event in follow(client, job_id, timeout=timeout):
                display.show(event)
    return succeeded(client, job_id, called=called)


def succeeded(client: Client, job_id: str, *, called: str = "job") -> dict[str, Any]:
    """A job that has ended.

    Raises:
        CliError: not well.
    """
    job: dict[str, Any] = client.get(path("v1", "train", "jobs", job_id))
    if job["state"] != "succeeded":
        reason = f": {job['reason']}" if job.get("reason") else ""
        message = f"{called} {job['id']} {job['state']}{reason}"
        raise CliError(message, error={"message": str(job.get("reason") or message), "job": job})
    return job


def conclude(output: Output, job: dict[str, Any]) -> None:
    """Tells the result of a job that succeeded."""
    if output.as_json:
        output.json(job)
    else:
        result = f"[green]{escape(job['id'])} succeeded[/]: {escape(str(job.get('result_adapter')))}"
        output.out.print(result + _learnt(job.get("metrics") or {}), soft_wrap=True)
        for note in job.get("notes") or ():
            output.err.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def _learnt(metrics: dict[str, float]) -> str:
    """Loss on the job's own examples before the first step and after the last one, in words."""
    if "loss_before" not in metrics or "loss_after" not in metrics:
        return ""
    return f" (loss on its examples {metrics['loss_before']:.3g} → {metrics['loss_after']:.3g})"


class _Display:
    """A bar with the newest numbers; on a pipe plain lines come out instead."""

    def __init__(self, output: Output, job_id: str) -> None:
        self._output = output
        self._numbers: dict[str, float] = {}
        self._live = output.err.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=output.err,
            disable=not self._live,
        )
        self._task = self._progress.add_task(job_id, total=None, numbers="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: Watched) -> None:
        if event.kind in ("progress", "eval"):
            self._numbers |= {
                key: value for key, value in event.data.items() if key in _SHOWN and isinstance(value, int | float)
            }
            step, total = event.data.get("step"), event.data.get("total_steps")
            numbers = "  ".join(f"{key} {self._numbers[key]:.4g}" for key in _SHOWN if key in self._numbers)
            if step is not None:
                self._progress.update(self._task, completed=step, total=total, numbers=numbers)
                if not self._live:
                    self._output.err.print(f"step {step}/{total}  {numbers}", soft_wrap=True)
            return
        if event.data.get("note"):
            return  # said at the end, with the other notes of the job
        details = "  ".join(
            _detail(event.kind, key, value) for key, value in event.data.items() if value not in (None, "")
        )
        self._progress.console.print(f"[dim]{event.kind}[/] {escape(details)}", soft_wrap=True)


def _detail(kind: str, key: str, value: object) -> str:
    """`state running`, `attempt 1`: what an event is called needs saying once."""
    return str(value) if key in (kind, "message") else f"{key} {value}"
