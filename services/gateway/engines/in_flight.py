"""The requests that one engine has of this gateway, and how much work they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from services.gateway.engines.prefix_index import Prediction
from services.gateway.engines.update_queue import Inbox


@dataclass(slots=True)
class Sent:
    """A request that the engine has not ended yet."""

    index: int
    inbox: Inbox
    adapter: str
    """Adapter that the request names; empty: none."""
    prefill: int
    """Prompt tokens to compute before the first of its answer; 0 from there on."""
    predicted: Prediction | None
    """What the engine should have of its prompt; None: such a prompt is read whole."""
    begun: bool = False


class Outstanding:
    """Books by request id. Used from the event loop only."""

    def __init__(self) -> None:
        self._sent: dict[str, Sent] = {}
        self._adapters: Counter[str] = Counter()
        self.prefill = 0
        """Prompt tokens of all that have not begun."""

    def __len__(self) -> int:
        return len(self._sent)

    def get(self, request_id: str) -> Sent | None:
        """None: it has ended, or nobody waits for it."""
        return self._sent.get(request_id)

    def names(self, adapter: str) -> bool:
        """Whether one of them names this adapter."""
        return adapter in self._adapters

    def add(self, request_id: str, sent: Sent) -> None:
        """A request was sent."""
        self._sent[request_id] = sent
        self._adapters[sent.adapter] += 1
        self.prefill += sent.prefill

    def begin(self, sent: Sent) -> None:
        """The first of its answer came."""
        self.prefill -= sent.prefill
        sent.begun, sent.prefill = True, 0

    def remove(self, request_id: str) -> bool:
        """Forgets a request that has ended; False if it is not known."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return False
        self.prefill -= sent.prefill
        self._adapters[sent.adapter] -= 1
        if not self._adapters[sent.adapter]:
            del self._adapters[sent.adapter]
        return True

    def take_all(self) -> list[Sent]:
        """All that are left; the books are empty then."""
        left = list(self._sent.values())
        self._sent.clear()
        self._adapters.clear()
        self.prefill = 0
        return left
