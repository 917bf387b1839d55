"""Completions asked for one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from services.common.errors import DeadlineExceeded, TemperError, Unavailable
from services.engine.loop.loop import EngineLoop
from services.engine.requests.adapter import AdapterChoice, PrivateVersion
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import FinishReason
from services.pod.rollouts.completions import completion_of, sampled
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutSampling


class EngineRolloutStream:
    """Implements services.trainer.host.rollouts.RolloutStream.

    Args:
        sampling: of every completion, but for its max_tokens.
    """

    def __init__(
        self,
        loop: EngineLoop,
        name: str,
        sampling: RolloutSampling,
        adapter: AdapterChoice | PrivateVersion,
        *,
        most: int,
        deadline: float,
    ) -> None:
        self._loop = loop
        self._name = name
        self._sampling = sampling
        self._adapter = adapter
        self.most = most
        self.most_tokens = loop.config.max_model_len
        self._deadline = deadline
        self._lock = threading.Lock()
        self._count = 0
        self._open: dict[str, tuple[RolloutRequest, Callable[[Completion | TemperError], None]]] = {}
        """Who waits for what; empty once the stream is closed."""
        self._cutting = False

    def submit(
        self, request: RolloutRequest, max_tokens: int, done: Callable[[Completion | TemperError], None]
    ) -> None:
        """See RolloutStream.submit."""
        with self._lock:
            name = f"{self._name}:{self._count}"
            self._count += 1
            self._open[name] = request, done
        self._loop.submit(
            sampled(name, request, replace(self._sampling, max_tokens=max_tokens), self._adapter), self._take
        )

    def cut(self) -> None:
        """See RolloutStream.cut."""
        with self._lock:
            self._cutting = True
            names = list(self._open)
        for name in names:
            self._loop.abort(name)
        # Behind these commands: when it has run, so have they, and this stream's sink has been told.
        self._loop.call_at_boundary(lambda: None).result()
        self._cutting = False

    def check(self) -> None:
        """See RolloutStream.check."""
        if not self._loop.alive:
            raise Unavailable("the engine loop has ended")
        if time.monotonic() > self._deadline:
            raise DeadlineExceeded(
                f"{len(self._open)} rollouts were under way at the deadline: users' requests go first, and what is "
                "asked between turns takes time; lower completions, max_tokens or max_turns, or raise "
                "TEMPER_ROLLOUT_TIMEOUT_SECONDS"
            )

    def close(self) -> None:
        """Aborts what is under way; nobody is told."""
        with self._lock:
            left, self._open = self._open, {}
        if left:
            self._loop.abort_all(self._take)

    def _take(self, updates: list[SequenceUpdate]) -> None:
        """Takes the updates of all requests, on the loop thread."""
        for update in updates:
            if update.finish_reason is None:
                continue
            # Told inside of the lock: once close() returns nobody is called any more.
            with self._lock:
                waiting = self._open.pop(update.request_id, None)
                if waiting is not None:
                    request, done = waiting
                    done(self._ended(request, update))

    def _ended(self, request: RolloutRequest, update: SequenceUpdate) -> Completion | TemperError:
        if update.error is not None:
            return update.error
        stopped = update.finish_reason is FinishReason.ABORT
        if stopped if not self._cutting else update.finished is None and not stopped:
            return Unavailable("the engine ended a rollout")
        return completion_of(request, update.finished)
