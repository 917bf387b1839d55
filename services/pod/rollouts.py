"""Rollouts of training jobs from the pod's own engine: requests like any other, with the lowest priority."""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from services.common.adapters.composition import Composition
from services.common.adapters.names import AdapterVersion
from services.common.errors import DeadlineExceeded, InvalidRequest, TemperError, Unavailable
from services.engine.adapters.private_versions import PrivateVersions
from services.engine.loop.loop import EngineLoop
from services.engine.models.lora.trainable import LoraParams
from services.engine.requests.adapter import AdapterChoice, PrivateVersion
from services.engine.requests.outputs import Finished, SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.trainer.host.rollouts import Completion, Policy, RolloutRequest, RolloutSampling, ScoreRequest

_PRIORITY = 2**31
"""Priority behind everything that a protobuf int32 can ask for."""
_USERS = 8
"""Users' requests for each gentle one beside them: a row and a short prompt more in a step."""
_LOOK_SECONDS = 0.05
"""Seconds between two checks whether the job may continue."""


class EngineRollouts:
    """Rollout source of a pod. Implements services.trainer.host.rollouts.RolloutSource.

    Args:
        vocab_size: vocabulary size of the model.
        sequences: most rollouts in the engine at once.
        timeout_seconds: timeout of a call without a deadline.
    """

    def __init__(
        self,
        loop: EngineLoop,
        private: PrivateVersions,
        *,
        vocab_size: int,
        sequences: int,
        timeout_seconds: float,
    ) -> None:
        self._loop = loop
        self._private = private
        self._vocab_size = vocab_size
        # More could not run and would only preempt each other.
        self._sequences = min(sequences, loop.config.max_num_seqs)
        self._timeout = timeout_seconds
        self._calls = itertools.count()
        self._scoring = f"score:{secrets.token_hex(16)}"
        """Prefix of the cache salts of scores: no client can send it, and no earlier process has used it."""

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """See RolloutSource.check."""
        room = self._loop.config.max_output(prompt_tokens, max_tokens)
        if room < max_tokens:
            raise InvalidRequest(
                f"a prompt of {prompt_tokens} tokens leaves room for {room} of {max_tokens} tokens in the engine's "
                f"context of {self._loop.config.max_model_len}: shorten the prompt or lower max_tokens",
                param="max_tokens",
            )

    @contextmanager
    def policy(self, lora: LoraParams, interrupt: Callable[[], None] = lambda: None) -> Iterator[PrivateVersion]:
        """See RolloutSource.policy."""
        # Through the files of a version, so that the sampling weights equal the published ones bit by bit.
        with self._private.loaded(lora.to_files(""), interrupt) as version:
            yield version

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: RolloutSampling,
        policy: Policy,
        *,
        interrupt: Callable[[], None] = lambda: None,
        deadline: float | None = None,
        gentle: bool = False,
    ) -> list[Completion]:
        """See RolloutSource.generate."""
        adapter = _choice(policy)
        call = next(self._calls)
        submissions = [
            _sampled(f"rollout:{call}:{number}", request, sampling, adapter) for number, request in enumerate(requests)
        ]
        found = self._run(submissions, interrupt, deadline, gentle=gentle)
        return [_completion(finished) for finished in found]

    @contextmanager
    def stream(
        self, temperature: float, stop_token_ids: frozenset[int], policy: Policy
    ) -> Iterator[EngineRolloutStream]:
        """See RolloutSource.stream."""
        stream = EngineRolloutStream(
            self._loop,
            f"rollout:{next(self._calls)}",
            RolloutSampling(temperature, 1, stop_token_ids),
            _choice(policy),
            most=self._sequences,
            deadline=time.monotonic() + self._timeout,
        )
        try:
            yield stream
        finally:
            stream.close()

    def score(
        self,
        requests: Sequence[ScoreRequest],
        policy: Policy,
        *,
        interrupt: Callable[[], None] = lambda: None,
        deadline: float | None = None,
    ) -> list[array[float]]:
        """See RolloutSource.score."""
        adapter = _choice(policy)
        call = next(self._calls)
        for request in requests:
            self._check_given(request)
        submissions = [
            Submission(
                f"score:{call}:{number}",
                request.prompt,
                SamplingParams.forcing(request.completion, request.temperature),
                adapter,
                # Salt of this call only: the bits must not depend on whether the cache still has an earlier call's
                # prompt.
                cache_salt=f"{self._scoring}:{call}",
                priority=_PRIORITY,
                background=True,
            )
            for number, request in enumerate(requests)
        ]
        found = self._run(submissions, interrupt, deadline)
        return [_scores(request, finished) for request, finished in zip(requests, found, strict=True)]

    def likelihoods(
        self,
        requests: Sequence[ScoreRequest],
        policy: Policy,
        *,
        interrupt: Callable[[], None] = lambda: None,
        deadline: float | None = None,
    ) -> list[float]:
        """See RolloutSource.likelihoods."""
        adapter = _choice(policy)
        call = next(self._calls)
        for request in requests:
            self._check_given(request, more=1)  # a request ends with a token of its own
        submissions = [
            Submission(
                f"likelihood:{call}:{number}",
                (*request.prompt, *request.completion),
                SamplingParams(temperature=0.0, max_tokens=1),
                adapter,
                priority=_PRIORITY,
                background=True,
                prompt_logprobs=0,
                prompt_logprobs_from=len(request.prompt),
                boundaries=(len(request.prompt),) if request.prompt else (),
            )
            for number, request in enumerate(requests)
        ]
        batch = self._batch(submissions, interrupt, deadline, gentle=True)
        return [math.fsum(batch.logprobs.get(submission.request_id, ())) for submission in submissions]

    def _check_given(self, request: ScoreRequest, more: int = 0) -> None:
        largest = max((*request.prompt, *request.completion), default=0)
        if largest >= self._vocab_size:
            raise InvalidRequest(
                f"token id {largest} is outside the vocabulary of {self._vocab_size}", param="completion"
            )
        self.check(len(request.prompt), len(request.completion) + more)

    def _run(
        self,
        submissions: Sequence[Submission],
        interrupt: Callable[[], None],
        deadline: float | None,
        *,
        gentle: bool = False,
    ) -> list[Finished]:
        """Runs the submissions and returns their results, in order."""
        batch = self._batch(submissions, interrupt, deadline, gentle=gentle)
        return [batch.finished[submission.request_id] for submission in submissions]

    def _batch(
        self,
        submissions: Sequence[Submission],
        interrupt: Callable[[], None],
        deadline: float | None,
        *,
        gentle: bool,
    ) -> _Batch:
        """Runs the submissions to their ends."""
        deadline = time.monotonic() + self._timeout if deadline is None else deadline
        batch = _Batch(self._loop, submissions, self._sequences, gentle=gentle)
        try:
            batch.run(interrupt, deadline)
        finally:
            batch.close()
        return batch


class _Batch:
    """Requests of one call: as many in the engine as allowed, and the next one when one ends.

    Args:
        gentle: beside users' requests only one for every `_USERS` of theirs.
    """

    def __init__(self, loop: EngineLoop, submissions: Sequence[Submission], sequences: int, *, gentle: bool) -> None:
        self._loop = loop
        self._gentle = gentle
        self._sequences = sequences
        self._expected = len(submissions)
        # Guarded by the condition's lock.
        self._changed = threading.Condition()
        self._left = deque(submissions)
        self._live = 0
        self.finished: dict[str, Finished] = {}
        """Results by their ids."""
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
                if len(self.finished) == self._expected:
                    return
            if begun.done():
                begun.result()
            if not self._loop.alive:
                raise Unavailable("the engine loop has ended")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{len(self.finished)} of {self._expected} rollouts were done at the deadline: users' requests "
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
        return self._error is not None or len(self.finished) == self._expected

    # On the loop thread.

    def _fill(self) -> None:
        with self._changed:
            most = self._most()
            while self._left and self._live < most and not self._closed and self._error is None:
                try:
                    self._loop.submit(self._left.popleft(), self._take)
                except TemperError as error:
                    self._error = error
                    self._changed.notify_all()
                    return
                self._live += 1

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
                self._live -= 1
                if update.error is not None:
                    self._error = self._error or update.error
                elif update.finished is None or update.finish_reason is FinishReason.ABORT:
                    self._error = self._error or Unavailable("the engine ended a rollout")
                else:
                    self.finished[update.request_id] = update.finished
            if self._over():
                self._changed.notify_all()
        self._fill()


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
        self._open: dict[str, Callable[[Completion | TemperError], None]] = {}
        """Who waits for what; empty once the stream is closed."""

    def submit(
        self, request: RolloutRequest, max_tokens: int, done: Callable[[Completion | TemperError], None]
    ) -> None:
        """See RolloutStream.submit."""
        with self._lock:
            name = f"{self._name}:{self._count}"
            self._count += 1
            self._open[name] = done
        self._loop.submit(
            _sampled(name, request, replace(self._sampling, max_tokens=max_tokens), self._adapter), self._take
        )

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
                done = self._open.pop(update.request_id, None)
                if done is not None:
                    done(_ended(update))


def _ended(update: SequenceUpdate) -> Completion | TemperError:
    if update.error is not None:
        return update.error
    if update.finished is None or update.finish_reason is FinishReason.ABORT:
        return Unavailable("the engine ended a rollout")
    return _completion(update.finished)


def _sampled(
    name: str, request: RolloutRequest, sampling: RolloutSampling, adapter: AdapterChoice | PrivateVersion
) -> Submission:
    return Submission(
        name,
        request.prompt,
        SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            top_p=sampling.top_p,
            seed=request.seed,
        ),
        adapter,
        priority=_PRIORITY,
        background=True,
    )


def _choice(policy: Policy) -> AdapterChoice | PrivateVersion:
    if policy is None:
        return AdapterChoice()
    if isinstance(policy, AdapterVersion | Composition):
        return AdapterChoice.of(policy)
    if not isinstance(policy, PrivateVersion):
        raise TypeError(f"{policy!r} is not a policy of this engine")
    return policy


def _completion(finished: Finished) -> Completion:
    return Completion(
        tuple(finished.output_ids),
        array("f", finished.sampling_logprobs),
        truncated=finished.finish_reason is FinishReason.LENGTH,
    )


def _scores(request: ScoreRequest, finished: Finished) -> array[float]:
    if tuple(finished.output_ids) != request.completion:
        raise TemperError("the engine returned other tokens than the forced ones")
    return array("f", finished.sampling_logprobs)
