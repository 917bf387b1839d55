"""Recorder: histories of objects, as clients that ask gateways see them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.histories.checker import LOST, Model, Operation, Undecided, check

Reader = Callable[[httpx.Response], Any]
"""What an answer says; None: that nothing was done and nothing was told, as of a request that was too many."""


class Wrong(Exception):
    """An answer that no client can make sense of."""


@dataclass(slots=True)
class Recorder:
    """Histories of many objects of one kind.

    Args:
        kind: of the objects, for the ledger.
    """

    kind: str
    model: Model[Any]
    histories: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    """Operations by object."""
    breaches: list[str] = field(default_factory=list)
    wrong: dict[str, list[Operation]] = field(default_factory=dict)
    """Histories that make no sense, to be looked at."""

    def note(self, key: str, name: str, argument: Any, result: Any, called: float, answered: float) -> None:
        """Adds an operation."""
        self.histories[key].append(Operation(name, argument, result, called, answered))

    async def send(
        self,
        client: httpx.AsyncClient,
        key: str,
        name: str,
        argument: Any,
        method: str,
        path: str,
        read: Reader,
        **options: Any,
    ) -> Any:
        """Sends a request once, and notes it; returns what the answer says, None if it is unknown.

        5xx and connections that end say nothing about the request.
        """
        called = time.monotonic()
        result = None
        try:
            response = await client.request(method, path, **options)
        except httpx.TransportError:
            self.note(key, name, argument, None, called, LOST)
            return None
        except asyncio.CancelledError:  # the campaign is over, and the request goes on
            self.note(key, name, argument, None, called, LOST)
            raise
        if response.status_code >= 500:
            self.note(key, name, argument, None, called, LOST)
            if response.status_code == 500:
                self.breaches.append(f"a 500 to {method} {path}: {response.text[:200]}")
            return None
        try:
            result = read(response)
        except (Wrong, KeyError, ValueError) as error:
            self.breaches.append(f"{method} {path}: {response.status_code} {response.text[:300]} ({error!r})")
            return None
        if result is not None:
            self.note(key, name, argument, result, called, time.monotonic())
        return result

    def judge(self) -> tuple[Counter[str], list[str]]:
        """Checks every history; returns how many operations and histories there were, and what is wrong."""
        counts: Counter[str] = Counter(histories=len(self.histories))
        wrong = list(self.breaches)
        for key, operations in self.histories.items():
            counts["operations"] += len(operations)
            counts["lost"] += sum(operation.lost for operation in operations)
            try:
                verdict = check(self.model, operations)
            except Undecided:
                counts["undecided"] += 1
                continue
            if not verdict.linearizable:
                self.wrong[key] = operations
                orders = "; ".join(str(operation) for operation in verdict.longest[-6:])
                stuck = "; ".join(str(operation) for operation in verdict.stuck[:6])
                wrong.append(f"the {self.kind} {key} is not linearizable: after [{orders}] none of [{stuck}] can come")
        return counts, wrong


def answered(*statuses: int) -> Callable[[httpx.Response], bool]:
    """Whether a response has one of these; others make no sense."""

    def look(response: httpx.Response) -> bool:
        if response.status_code not in statuses:
            raise Wrong(f"status {response.status_code}")
        return True

    return look
