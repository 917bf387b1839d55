"""Rollout buffer: finished completions are kept for a while, so that a client may send just {completion_id, reward}."""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from services.engine.requests.conversation_session import SessionName
from services.engine.requests.outputs import Finished
from services.engine.requests.request import FinishReason

_OVERHEAD = 512
"""Approximate bytes of the objects around the arrays."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout: a completion with its tokens and their log-probabilities."""

    completion_id: str
    prompt_token_ids: array[int]
    """uint32."""
    token_ids: array[int]
    """uint32."""
    sampling_logprobs: array[float]
    """Log-probabilities log softmax(logits / temperature)[token], float32, one per token."""
    temperature: float
    adapter: str
    """Adapter version "name@n" of the behaviour policy, empty for the base."""
    finish_reason: FinishReason
    owner: str = ""
    """Id of the API key that sent the request; empty: there are no keys."""
    session: str = ""
    """Name of the owner's conversation session; empty: the request had none."""
    ended_at: float = 0.0
    """Unix seconds."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.sampling_logprobs):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.sampling_logprobs)} log-probabilities")

    @classmethod
    def of(cls, finished: Finished, owner: str = "") -> Rollout:
        request = finished.request
        return cls(
            completion_id=request.request_id,
            prompt_token_ids=array("I", request.prompt_token_ids),
            token_ids=array("I", finished.output_ids),
            sampling_logprobs=finished.sampling_logprobs,
            temperature=request.sampling.temperature,
            adapter=request.pin.version,
            finish_reason=finished.finish_reason,
            owner=owner,
            session="" if request.session is None else request.session.name,
            ended_at=time.time(),
        )

    @property
    def nbytes(self) -> int:
        arrays = (self.prompt_token_ids, self.token_ids, self.sampling_logprobs)
        return _OVERHEAD + sum(values.itemsize * len(values) for values in arrays)


class RolloutBuffer:
    """Buffer of the newest rollouts, bounded in number, bytes and age. Thread-safe.

    Args:
        max_count: most rollouts; 0 keeps none.
        ttl_seconds: time that each is kept.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_count: int,
        ttl_seconds: float,
        max_bytes: int = 256 * 1024**2,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_count < 0 or max_bytes < 0 or ttl_seconds <= 0:
            raise ValueError(
                f"max_count {max_count}, max_bytes {max_bytes} or ttl_seconds {ttl_seconds} is out of range"
            )
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._ttl = ttl_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._rollouts: OrderedDict[str, tuple[float, Rollout]] = OrderedDict()
        """Rollouts with the time of their arrival, oldest first."""
        self._bytes = 0

    def __len__(self) -> int:
        with self._lock:
            self._forget_old()
            return len(self._rollouts)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def remember(self, rollout: Rollout) -> None:
        """Adds a rollout, replacing one of the same id; the oldest ones are dropped when there are too many."""
        with self._lock:
            self._remove(rollout.completion_id)
            self._rollouts[rollout.completion_id] = (self._clock(), rollout)
            self._bytes += rollout.nbytes
            self._forget_old()
            while self._rollouts and (len(self._rollouts) > self._max_count or self._bytes > self._max_bytes):
                self._remove(next(iter(self._rollouts)))

    def get(self, completion_ids: Iterable[str]) -> tuple[list[Rollout], list[str]]:
        """Known rollouts in the order asked for, and the ids that are not known."""
        found: list[Rollout] = []
        missing: list[str] = []
        with self._lock:
            self._forget_old()
            for completion_id in completion_ids:
                entry = self._rollouts.get(completion_id)
                if entry is None:
                    missing.append(completion_id)
                else:
                    found.append(entry[1])
        return found, missing

    def of_sessions(self, sessions: Iterable[SessionName]) -> list[Rollout]:
        """Rollouts of these conversation sessions, oldest first."""
        asked = {(session.owner, session.name) for session in sessions}
        with self._lock:
            self._forget_old()
            return [one for _, one in self._rollouts.values() if one.session and (one.owner, one.session) in asked]

    def cut(self, completion_id: str, tokens: int) -> None:
        """Cuts a rollout to its first ``tokens`` tokens, because the text ended there at a stop string."""
        with self._lock:
            entry = self._rollouts.get(completion_id)
            if entry is None or len(entry[1].token_ids) <= tokens:
                return
            since, rollout = entry
            shorter = replace(
                rollout,
                token_ids=rollout.token_ids[:tokens],
                sampling_logprobs=rollout.sampling_logprobs[:tokens],
                finish_reason=FinishReason.STOP,
            )
            # The entry keeps its place: its age does not change.
            self._rollouts[completion_id] = (since, shorter)
            self._bytes += shorter.nbytes - rollout.nbytes

    def _forget_old(self) -> None:
        expiry = self._clock() - self._ttl
        while self._rollouts:
            completion_id, (since, _) = next(iter(self._rollouts.items()))
            if since > expiry:
                return
            self._remove(completion_id)

    def _remove(self, completion_id: str) -> None:
        entry = self._rollouts.pop(completion_id, None)
        if entry is not None:
            self._bytes -= entry[1].nbytes
