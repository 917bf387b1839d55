"""Requests of one call, which the engine runs to their ends, or until they are cut."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from services.common.errors import DeadlineExceeded, TemperError, Unavailable
from services.engine.loop.loop import EngineLoop
from services.engine.requests.outputs import Finished, SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.submission import Submission

_USERS = 8
"""Users' requests for each gentle one beside them: a row and a short prompt more in a step."""
_LOOK_SECONDS = 0.05
"""Seconds between two checks whether the job may continue."""


class Batch:
    """Requests of one call: as many in the engine as allowed, and the next one when one ends.

    Args:
        gentle: beside users' requests only one for every `_USERS` of theirs.
        cut: see RolloutSource.generate.
    """

    def __init__(
        self,
        loop: EngineLoop,
        submissions: Sequence[Submission],
        sequences: int,
        *,
        gentle: bool,
        cut: Callable[[int], bool] | None = None,
    ) -> None:
        self._loop = loop
        self._gentle = gentle
        self._cut = cut
        self._sequences = sequences
        self._expected = len(submissions)
        # Guarded by the condition's lock.
        self._changed = threading.Condition()
        self._left = deque(submissions)
        self._live: set[str] = set()
        self._cutting = False
        self._ended = 0
        """Requests that came to their own ends."""
        self.finished: dict[str, Finished] = {}
        """Results by their ids; of those that were cut before their first step there is none."""
        self.logprobs: dict[str, list[float]] = {}
        """Log-probabilities of the prompts' tokens, of requests that ask for them."""
        self._error: TemperError | None = None
        self._closed = False

    def run(self, interrupt: Callable[[], None], deadline: float) -> None:
        """Blocks until all requests have ended. Raises the first error of a request, and what ``interrupt`` raises."""
        # Submitted at one boundary, so that which rollouts share a step does not depend on thread timing.
        begun = self._loop.call_at_boundary(self._fill)
        while True:
            with self._changed:
                self._changed.wait_for(self._over, _LOOK_SECONDS)
                if self._error is not None:
                    raise self._error
                if self._over():
                    return
            if begun.done():
                begun.result()
            if not self._loop.alive:
                raise Unavailable("the engine loop has ended")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self._ended} of {self._expected} rollouts were done at the deadline: users' requests "
                    "go first; lower completions or max_tokens, or raise TEMPER_ROLLOUT_TIMEOUT_SECONDS"
                )
            interrupt()

    def close(self) -> None:
        """Aborts the requests that are left."""
        with self._changed:
            self._closed = True
            if self._live:
                self._loop.abort_all(self._take)

    def _over(self) -> bool:
        return self._error is not None or self._ended == self._expected or (self._cutting and not self._live)

    # On the loop thread.

    def _fill(self) -> None:
        with self._changed:
            most = self._most()
            while self._left and len(self._live) < most and not (self._closed or self._cutting or self._error):
                submission = self._left.popleft()
                try:
                    self._loop.submit(submission, self._take)
                except TemperError as error:
                    self._error = error
                    self._changed.notify_all()
                    return
                self._live.add(submission.request_id)

    def _most(self) -> int:
        """Most of these requests that are in the engine now."""
        status = self._loop.status()
        users = status.counts.running + status.counts.waiting - status.background
        return self._sequences if users <= 0 or not self._gentle else max(1, min(self._sequences, users // _USERS))

    def _take(self, updates: list[SequenceUpdate]) -> None:
        """Takes the updates of all requests; their sink."""
        with self._changed:
            for update in updates:
                if update.prompt is not None:
                    self.logprobs.setdefault(update.request_id, []).extend(update.prompt.logprobs.tolist())
                if update.finish_reason is None:
                    continue
                self._live.discard(update.request_id)
                stopped = update.finish_reason is FinishReason.ABORT
                if update.error is not None:
                    self._error = self._error or update.error
                elif stopped if not self._cutting else update.finished is None and not stopped:
                    self._error = self._error or Unavailable("the engine ended a rollout")
                else:
                    self._ended += not stopped
                    if update.finished is not None:
                        self.finished[update.request_id] = update.finished
            if self._cut is not None and not self._cutting and self._cut(self._ended):
                self._cutting = True
                for name in self._live:
                    self._loop.abort(name)
            if self._over():
                self._changed.notify_all()
        self._fill()
