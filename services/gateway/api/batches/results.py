"""Results on their way from memory into parts."""

from __future__ import annotations

import asyncio
import time

from services.gateway.api.batches.parts import Result

PART_BYTES = 4 * 2**20
_PART_LINES = 1000
_PART_SECONDS = (1.0, 60.0)
"""The youngest and the oldest that a result waits to be stored: the longer a batch runs, the fewer parts a minute. A
hundredth of its time is what a batch may lose with its gateway, and a day's makes some hundreds of parts."""


class Buffer:
    """Results that are not stored yet."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._oldest: float | None = None
        self._bytes = 0
        self.results: list[Result] = []
        self.room = asyncio.Event()
        """Nothing more is computed than memory has room for while the store is away."""
        self.room.set()

    def add(self, result: Result) -> None:
        self._oldest = self._oldest or time.monotonic()
        self._bytes += len(result.json)
        self.results.append(result)
        if self.full:
            self.room.clear()

    def clear(self) -> None:
        self._oldest, self._bytes, self.results = None, 0, []
        self.room.set()

    @property
    def full(self) -> bool:
        """Whether the results are to be stored at once."""
        return self._bytes >= PART_BYTES or len(self.results) >= _PART_LINES

    @property
    def due(self) -> bool:
        """Whether the results are to be stored now."""
        if self._oldest is None:
            return False
        now = time.monotonic()
        youngest, oldest = _PART_SECONDS
        return self.full or now - self._oldest >= min(max((now - self._began) / 100, youngest), oldest)
