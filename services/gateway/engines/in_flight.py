"""Requests in flight: what one engine has been sent and has not ended, and how much work that is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from services.common.pb import engine_pb2
from services.gateway.engines.prefix_index import Prediction
from services.gateway.engines.update_queue import UpdateQueue


@dataclass(slots=True)
class InFlightRequest:
    """Request that an engine has not ended yet."""

    index: int
    """Index of the request among those of its HTTP request."""
    queue: UpdateQueue
    """Queue that its updates go to, with the index."""
    adapter: str
    """Adapter that the request names; empty: none."""
    prefill: int
    """Prompt tokens to compute before the first of its answer; 0 from there on."""
    predicted: Prediction | None
    """Prediction of how much of the prompt the engine has cached; None: such a prompt is read whole."""
    begun: bool = False
    """True once the first of the answer came."""


class InFlightRequests:
    """Requests that one engine has of this gateway, and how much work they are. Used from the event loop only."""

    def __init__(self) -> None:
        self._sent: dict[str, InFlightRequest] = {}
        self._adapters: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self.prefill = 0
        """Prompt tokens of all that have not begun."""

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def load(self) -> engine_pb2.Load:
        """Load of all, as an engine tells it."""
        return engine_pb2.Load(requests=len(self._sent), prefill_tokens=self.prefill)

    def others(self, status: engine_pb2.EngineStatus, before: engine_pb2.Load) -> engine_pb2.Load:
        """Load of other gateways' requests: what an engine has more than this gateway had at any of two moments.

        Args:
            status: what the engine tells.
            before: load when it was asked.
        """
        requests = status.running + status.waiting - max(before.requests, len(self._sent))
        prefill = status.load.prefill_tokens - max(before.prefill_tokens, self.prefill)
        return engine_pb2.Load(requests=max(0, requests), prefill_tokens=max(0, prefill))

    def get(self, request_id: str) -> InFlightRequest | None:
        """Request of this id; None: it has ended, or nobody waits for it."""
        return self._sent.get(request_id)

    def names(self, adapter: str) -> bool:
        """True if one of the requests names this adapter."""
        return adapter in self._adapters

    def begun(self, adapter: str) -> bool:
        """True if one that names this adapter is answered: it is in a slot."""
        return adapter in self._begun

    def add(self, request_id: str, sent: InFlightRequest) -> None:
        """Adds a request that was sent."""
        self._sent[request_id] = sent
        self._adapters[sent.adapter] += 1
        self.prefill += sent.prefill

    def begin(self, sent: InFlightRequest) -> None:
        """Counts the prompt of a request as read: the first of its answer came."""
        self.prefill -= sent.prefill
        sent.begun, sent.prefill = True, 0
        self._begun[sent.adapter] += 1

    def remove(self, request_id: str) -> bool:
        """Forgets a request that has ended; False if it is not known."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return False
        self.prefill -= sent.prefill
        for count in (self._adapters, self._begun) if sent.begun else (self._adapters,):
            count[sent.adapter] -= 1
            if not count[sent.adapter]:
                del count[sent.adapter]
        return True

    def take_all(self) -> list[InFlightRequest]:
        """All that are left; none is in flight then."""
        left = list(self._sent.values())
        self._sent.clear()
        self._adapters.clear()
        self._begun.clear()
        self.prefill = 0
        return left
