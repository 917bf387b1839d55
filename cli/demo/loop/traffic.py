"""Traffic of the demo's loop: visitors who come one after another on a few threads, and what is known of each visit."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from cli.demo.loop.visitors import Visitor, troll, visitor
from cli.http.client import Client
from cli.output import CliError, ExitCode

_AT_ONCE = 8
_PAUSE_SECONDS = 0.4
"""Time between two visitors of one thread, where nobody hurries."""
_ANSWER_TOKENS = 24
_LONGEST_WAIT = 120.0


@dataclass(frozen=True, slots=True)
class Visit:
    """One question with its answer and the reaction, as the visitor's side knows them."""

    at: float
    """Seconds since the traffic began."""
    version: str
    """The adapter version that answered, or "base"."""
    rating: float
    troll: bool = False


class Traffic:
    """Visitors of one chat. Each asks at temperature 1 and sends feedback.

    Args:
        model: the name that they ask for; no adapter is named, so what is attached and what is tried answers them.
    """

    def __init__(self, client: Client, model: str, seed: int) -> None:
        self.visits: list[Visit] = []
        self._client = client
        self._model = model
        self._seed = seed
        self._began = time.monotonic()
        self._numbers = itertools.count()
        self._hurry, self._trolls, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    @property
    def now(self) -> float:
        """Seconds since the traffic began."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        """Lets visitors come until the end of the block."""
        threads = [threading.Thread(target=self._come, daemon=True) for _ in range(_AT_ONCE)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        self.check()

    @contextlib.contextmanager
    def hurrying(self) -> Iterator[None]:
        """Lets visitors follow each other without a pause."""
        self._hurry.set()
        try:
            yield
        finally:
            self._hurry.clear()

    @contextlib.contextmanager
    def trolling(self) -> Iterator[None]:
        """Lets trolls come, and nobody else."""
        self._trolls.set()
        try:
            yield
        finally:
            self._trolls.clear()

    def wait(self, count: int, of: Callable[[Visit], bool] = lambda visit: not visit.troll) -> Sequence[Visit]:
        """The next ``count`` visits for which ``of`` is true.

        Raises:
            CliError: a visitor got no answer, or too few come.
        """
        until = time.monotonic() + _LONGEST_WAIT
        first = len(self.visits)
        while True:
            self.check()
            found = [visit for visit in self.visits[first:] if of(visit)]
            if len(found) >= count:
                return found[:count]
            if time.monotonic() > until:
                message = f"{len(found)} of {count} visitors came in {_LONGEST_WAIT:.0f} s"
                raise CliError(message, ExitCode.TIMED_OUT)
            with self._changed:
                self._changed.wait(0.5)

    def check(self) -> None:
        """Raises what ended a thread of visitors, if anything did."""
        if isinstance(self._failure, CliError):
            raise CliError(f"a visitor got no answer: {self._failure.message}", self._failure.code)
        if self._failure is not None:
            raise self._failure

    def _come(self) -> None:
        while not self._stop.is_set():
            try:
                visit = self._visit((troll if self._trolls.is_set() else visitor)(self._seed, next(self._numbers)))
            except BaseException as error:
                self._failure = self._failure or error
                return
            with self._changed:
                self.visits.append(visit)
                self._changed.notify_all()
            if not self._hurry.is_set():
                self._stop.wait(_PAUSE_SECONDS)

    def _visit(self, who: Visitor) -> Visit:
        """One visitor asks, reads and reacts."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": who.question}],
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 1.0,
            "user": who.name,
        }
        answer: dict[str, Any] = self._client.post("/v1/chat/completions", body)
        reaction = who.react(answer["choices"][0]["message"]["content"] or "")
        said: dict[str, Any] = {"completion_id": answer["id"], "user": who.name, "score": reaction.rating}
        if reaction.correction is not None:
            said["correction"] = reaction.correction
        self._client.post("/v1/feedback", said)
        return Visit(self.now, answer.get("adapter") or "base", reaction.rating, who.troll)


def satisfaction(visits: Sequence[Visit]) -> float:
    """Mean rating, from -1 to 1."""
    return fmean(visit.rating for visit in visits)
