"""Recent prompts of an engine, as hashes of their blocks: what each gateway is told of the others' requests."""

from __future__ import annotations

from collections import deque

_MOST_BYTES = 4 * 2**20
"""Of the hashes that are remembered: half a million blocks."""


class RecentPrompts:
    """The latest prompts that gateways sent, numbered from 1 on. Used from the event loop only.

    Args:
        most_bytes: of all hashes together; the oldest prompts are forgotten first.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most = most_bytes
        self._size = 0
        self._prompts: deque[bytes] = deque()
        self.seen = 0
        """Number of the last prompt; 0: there was none."""

    def note(self, hashes: bytes) -> None:
        """A request was taken. One without hashes is of a client that routes in another way, or is too short."""
        if not hashes:
            return
        self.seen += 1
        self._prompts.append(hashes)
        self._size += len(hashes)
        while self._size > self._most:
            self._size -= len(self._prompts.popleft())

    def after(self, number: int) -> list[bytes]:
        """Hashes of the prompts behind that with a number, oldest first, as far as they are remembered. Who names a
        number that was not reached has heard it of an engine before this one, and gets all."""
        fresh = self.seen - number if number <= self.seen else self.seen
        return list(self._prompts)[max(0, len(self._prompts) - fresh) :] if fresh else []
