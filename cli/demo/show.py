"""Everything the demos print: headings, answers as they come, and a line of progress for what takes time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


@dataclass(slots=True)
class Bar:
    """One line of progress."""

    progress: Progress
    task: TaskID
    ended: str = ""

    def advance(self) -> None:
        self.progress.advance(self.task)
        self._count()

    def say(self, text: str) -> None:
        self.progress.update(self.task, note=escape(text[:60]))

    def job(self, step: int, total: int, metrics: dict[str, Any]) -> None:
        shown = (f"{key} {metrics[key]:.3g}" for key in ("loss", "grad_norm") if isinstance(metrics.get(key), float))
        self.progress.update(self.task, completed=step, total=total, note="  ".join(shown))
        self._count()

    def _count(self) -> None:
        task = self.progress.tasks[0]
        self.progress.update(self.task, count=f"{task.completed:.0f}/{task.total:.0f}" if task.total else "")

    def end(self, text: str) -> None:
        """Completes the bar; ``text`` stays beside it."""
        self.ended = text
        total = self.progress.tasks[0].total or 1
        self.progress.update(self.task, completed=total, total=total, note=f"[green]{escape(text)}[/]")
        self.progress.stop()


@dataclass(frozen=True, slots=True)
class Show:
    """Output of a demo. On a pipe a bar becomes one line when it is done."""

    console: Console

    def heading(self, text: str) -> None:
        self.console.print(f"\n[bold]{escape(text)}[/]")

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{escape(text)}[/]", soft_wrap=True)

    def stream(self, question: str, pieces: Iterator[str], *, by: str | None = None) -> str:
        """Prints the answer as it comes and returns it."""
        self.console.print(f"  [cyan]{escape(question)}[/]{f' [dim]{by}[/]' if by else ''}\n  ", end="")
        answer = ""
        for piece in pieces:
            answer += piece
            self.console.print(escape(piece), end="", soft_wrap=True)
        self.console.print()
        return answer

    @contextlib.contextmanager
    def task(self, text: str, total: int | None = None) -> Iterator[Bar]:
        """A bar while the block runs, until its `end`."""
        live = self.console.is_terminal
        progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]:>7}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not live,
        )
        start = time.monotonic()
        with progress:
            bar = Bar(progress, progress.add_task(f"{text:44}", total=total, note="", count=""))
            yield bar
        if not live:
            self.console.print(
                f"  {escape(text)}: {escape(bar.ended)} ({time.monotonic() - start:.1f} s)", soft_wrap=True
            )
