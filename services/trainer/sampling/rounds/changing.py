"""A stream of completions whose policy changes while they are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from services.common.errors import TemperError
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutSource, RolloutStream
from services.trainer.sampling.rounds.groups import going_on
from services.trainer.sampling.rounds.newest import NewestPolicy, PolicyAt

Done = Callable[[Completion | TemperError], None]


class ChangingStream:
    """Implements RolloutStream; completions say by which policies their tokens are.

    What is under way when the policy changes is cut and asked for anew: the new policy reads what there is of it, and
    nothing that the old one computed is used. All but what `tell` does runs on one thread, the one that samples.

    Args:
        newest: hands on newer policies, which are taken up in check(); None: there are none.
        interrupt: may raise while a policy waits for its slot.
    """

    def __init__(
        self,
        source: RolloutSource,
        temperature: float,
        stop_token_ids: frozenset[int],
        newest: NewestPolicy | None,
        interrupt: Callable[[], None],
    ) -> None:
        self._source = source
        self._temperature = temperature
        self._stop_token_ids = stop_token_ids
        self._newest = newest
        self._interrupt = interrupt
        self._stack = ExitStack()
        self._stream: RolloutStream | None = None
        self._version = 0.0
        self._lock = threading.Lock()
        self._cut: list[tuple[RolloutRequest, int, Done, Completion]] = []
        """What was under way under the policy before, guarded by the lock."""
        self.changed = 0
        """How often a completion went on with a newer policy."""

    def use(self, policy: PolicyAt) -> None:
        """Samples by this policy from now on. Raises as RolloutSource.policy."""
        if self._stream is not None:
            self._stream.cut()
        # The old policy's slot first: there may be no second one.
        self._stack.close()
        loaded = self._stack.enter_context(self._source.policy(policy.lora, self._interrupt))
        stream = self._source.stream(self._temperature, self._stop_token_ids, loaded)
        self._stream = self._stack.enter_context(stream)
        self._version = policy.version
        with self._lock:
            cut, self._cut = self._cut, []
        for request, max_tokens, done, found in cut:
            self.changed += bool(found.token_ids)
            self._ask(request, max_tokens, done, going_on(request, found))

    def close(self) -> None:
        """Aborts what is under way, and gives the slot back."""
        self._stack.close()
        self._stream = None

    @property
    def most(self) -> int:
        """See RolloutStream.most."""
        return self._open.most

    @property
    def most_tokens(self) -> int:
        """See RolloutStream.most_tokens."""
        return self._open.most_tokens

    def submit(self, request: RolloutRequest, max_tokens: int, done: Done) -> None:
        """See RolloutStream.submit."""
        self._ask(request, max_tokens, done, request)

    def cut(self) -> None:
        """See RolloutStream.cut: what is cut stays so until use()."""
        self._open.cut()

    def check(self) -> None:
        """See RolloutStream.check; takes up a newer policy."""
        self._open.check()
        newer = None if self._newest is None else self._newest.after(self._version)
        if newer is not None:
            self.use(newer)

    @property
    def _open(self) -> RolloutStream:
        if self._stream is None:
            raise ValueError("no policy is in use")
        return self._stream

    def _ask(self, request: RolloutRequest, max_tokens: int, done: Done, asked: RolloutRequest) -> None:
        self._open.submit(asked, max_tokens, partial(self._told, request, max_tokens, done, self._version))

    def _told(
        self, request: RolloutRequest, max_tokens: int, done: Done, version: float, found: Completion | TemperError
    ) -> None:
        """On a thread of the engine."""
        if isinstance(found, TemperError):
            done(found)
        elif found.cut:
            with self._lock:
                self._cut.append((request, max_tokens, done, found.by(version)))
        else:
            done(found.by(version))
