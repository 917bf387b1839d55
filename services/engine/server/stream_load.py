"""Load of the streams to an engine: what each gateway's requests are to it, and what the others are told of them.

Gateways choose engines by what waits there. A request with much to compute is told at once to all that did not send it,
and again when it has its first token, and so are many requests that have come or ended: until they next ask for the
status, they would send theirs behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.pb import engine_pb2 as pb

MUCH_PREFILL = 512
"""Prompt tokens to compute that are told at once: some 10 ms of a large model."""
MANY_REQUESTS = 8
"""Requests of a stream, come or ended since the others last heard of it, that are told at once: half of the choices of
a prompt that are sent together, of which the first tells what they compute but not how many they are."""


@dataclass(slots=True)
class Load:
    """Requests that have not ended, and the prompt tokens that those without a token should take."""

    requests: int = 0
    prefill: int = 0

    def add(self, requests: int, prefill: int) -> None:
        """Changes both."""
        self.requests += requests
        self.prefill += prefill

    @property
    def message(self) -> pb.Load:
        """As it is told."""
        return pb.Load(requests=self.requests, prefill_tokens=self.prefill)


Tell = Callable[[bytes], None]
"""Called with the hashes of a prompt that another stream's request has; empty: only the load has changed."""


class StreamLoads:
    """Load of an engine's streams. Used from the event loop only."""

    def __init__(self) -> None:
        self.total = Load()
        self._listeners: dict[StreamLoad, Tell] = {}

    def open(self, tell: Tell | None = None) -> StreamLoad:
        """A stream's part.

        Args:
            tell: None: the stream does not want to know of the others.
        """
        opened = StreamLoad(self)
        if tell is not None:
            self._listeners[opened] = tell
        return opened

    def changed(self, stream: StreamLoad, hashes: bytes) -> None:
        """Tells all streams but one, which has changed by much."""
        for other, tell in self._listeners.items():
            if other is not stream:
                tell(hashes)

    def closed(self, stream: StreamLoad) -> None:
        """A stream is told nothing any more."""
        self._listeners.pop(stream, None)


class StreamLoad:
    """Requests of one stream.

    Args:
        loads: of all.
    """

    def __init__(self, loads: StreamLoads) -> None:
        self._loads = loads
        self._own = Load()
        self._prefill: dict[str, int] = {}
        """Prompt tokens of each request; 0 once it has a token."""
        self._untold = 0
        """Requests that have come, less those that have ended, since the other streams were told."""

    def __contains__(self, name: str) -> bool:
        return name in self._prefill

    def __len__(self) -> int:
        return len(self._prefill)

    def submitted(self, message: pb.GenerateRequest) -> None:
        """A request was taken. It is no more load than its prompt, whatever its gateway expects."""
        prefill = min(message.expected_prefill, len(message.prompt_token_ids))
        self._prefill[message.request_id] = prefill
        self._change(1, prefill, message.prefix_hashes)

    def begun(self, name: str) -> None:
        """A request has its first token, or one more."""
        if prefill := self._prefill.get(name, 0):
            self._prefill[name] = 0
            self._change(0, -prefill)

    def ended(self, name: str) -> None:
        """A request has ended; one that is not known, too."""
        prefill = self._prefill.pop(name, None)
        if prefill is not None:
            self._change(-1, -prefill)

    def close(self) -> None:
        """The stream is gone, and its requests with it."""
        self._loads.closed(self)
        for name in tuple(self._prefill):
            self.ended(name)

    @property
    def others(self) -> Load:
        """Load of all other streams."""
        total = self._loads.total
        return Load(total.requests - self._own.requests, total.prefill - self._own.prefill)

    def _change(self, requests: int, prefill: int, hashes: bytes = b"") -> None:
        for load in (self._own, self._loads.total):
            load.add(requests, prefill)
        self._untold += requests
        if abs(prefill) >= MUCH_PREFILL or abs(self._untold) >= MANY_REQUESTS:
            self._untold = 0
            self._loads.changed(self, hashes)
