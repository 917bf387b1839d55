"""Rollouts of training jobs from the pod's own engine: requests like any other, with the lowest priority."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from services.common.adapters.composition import Composition
from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest, TemperError
from services.engine.adapters.private_versions import PrivateVersions
from services.engine.loop.loop import EngineLoop
from services.engine.models.lora.trainable import LoraParams
from services.engine.requests.adapter import AdapterChoice, PrivateVersion
from services.engine.requests.outputs import Finished
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.pod.rollouts.batch import Batch
from services.pod.rollouts.completions import PRIORITY, completion_of, sampled
from services.pod.rollouts.stream import EngineRolloutStream
from services.trainer.host.rollouts import Completion, Policy, RolloutRequest, RolloutSampling, ScoreRequest


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
        cut: Callable[[int], bool] | None = None,
    ) -> list[Completion]:
        """See RolloutSource.generate."""
        adapter = _choice(policy)
        call = next(self._calls)
        submissions = [
            sampled(f"rollout:{call}:{number}", request, sampling, adapter) for number, request in enumerate(requests)
        ]
        batch = self._batch(submissions, interrupt, deadline, gentle=gentle, cut=cut)
        return [
            completion_of(request, batch.finished.get(submission.request_id))
            for request, submission in zip(requests, submissions, strict=True)
        ]

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
                priority=PRIORITY,
                background=True,
            )
            for number, request in enumerate(requests)
        ]
        batch = self._batch(submissions, interrupt, deadline, gentle=False)
        return [
            _scores(request, batch.finished[submission.request_id])
            for request, submission in zip(requests, submissions, strict=True)
        ]

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
                priority=PRIORITY,
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

    def _batch(
        self,
        submissions: Sequence[Submission],
        interrupt: Callable[[], None],
        deadline: float | None,
        *,
        gentle: bool,
        cut: Callable[[int], bool] | None = None,
    ) -> Batch:
        """Runs the submissions to their ends, or until they are cut."""
        deadline = time.monotonic() + self._timeout if deadline is None else deadline
        batch = Batch(self._loop, submissions, self._sequences, gentle=gentle, cut=cut)
        try:
            batch.run(interrupt, deadline)
        finally:
            batch.close()
        return batch


def _choice(policy: Policy) -> AdapterChoice | PrivateVersion:
    if policy is None:
        return AdapterChoice()
    if isinstance(policy, AdapterVersion | Composition):
        return AdapterChoice.of(policy)
    if not isinstance(policy, PrivateVersion):
        raise TypeError(f"{policy!r} is not a policy of this engine")
    return policy


def _scores(request: ScoreRequest, finished: Finished) -> array[float]:
    if tuple(finished.output_ids) != request.completion:
        raise TemperError("the engine returned other tokens than the forced ones")
    return array("f", finished.sampling_logprobs)
