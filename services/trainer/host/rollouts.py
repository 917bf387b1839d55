"""Interface by which a job samples completions on the engine beside it, or has them scored. The pod implements it
(services/pod/rollouts/source.py)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from services.common.adapters.composition import Published
from services.common.errors import TemperError
from services.engine.models.lora.trainable import LoraParams
from services.trainer.timers import StepTimer


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One completion to sample."""

    prompt: tuple[int, ...]
    seed: int
    """Tokens are a function of the policy, the prompt, what is ``begun`` and this."""
    begun: Completion | None = None
    """A completion of the prompt that was cut, and goes on: it is read, and the answer has it and what follows."""


@dataclass(frozen=True, slots=True)
class RolloutSampling:
    """Sampling parameters of a job. There is no top_k or min_p, and top_p is for evaluations only, which do not read
    log-probabilities: see docs/decisions/sampling-logprobs.md."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """Besides the model's own end tokens."""
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion that the engine sampled."""

    token_ids: tuple[int, ...]
    """Token ids with the one that ended the completion, unless it is ``truncated``."""
    logprobs: array[float]
    """float32, one a token: log softmax(logits / temperature)[token]; at temperature 0 of the plain distribution."""
    truncated: bool
    """Whether the completion hit max_tokens."""
    cut: bool = False
    """It was stopped before its end, and may go on in another request."""
    versions: tuple[tuple[float, int], ...] = ()
    """Policies of its tokens, as far as somebody said them with by(): the version, and how many tokens in a row."""

    def by(self, version: float) -> Completion:
        """The same, the tokens that nobody has named a policy of being of this one."""
        known = sum(count for _, count in self.versions)
        if known == len(self.token_ids):
            return self
        return replace(self, versions=(*self.versions, (version, len(self.token_ids) - known)))


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One completion to score."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    temperature: float
    """Temperature that it was sampled at; 0 is scored as 1, as greedy tokens are."""


class PrivatePolicy(Protocol):
    """An adapter that is loaded for one job alone; see RolloutSource.policy."""

    @property
    def digest(self) -> str:
        """Digest of the policy; no other policy ever has it."""
        ...


Policy = PrivatePolicy | Published | None
"""Policy that samples: a job's own adapter as it is now, a published version, a composition of versions, or (None) the
model without an adapter."""


class RolloutStream(Protocol):
    """Completions asked for one by one, each told when it has ended; for those that depend on what others say."""

    @property
    def most(self) -> int:
        """Completions that should be under way at once."""
        ...

    @property
    def most_tokens(self) -> int:
        """Tokens of the engine's context."""
        ...

    def submit(
        self, request: RolloutRequest, max_tokens: int, done: Callable[[Completion | TemperError], None]
    ) -> None:
        """Asks for a completion of ``max_tokens``, with what is begun of it. ``done`` is called on a thread of the
        engine, and hands on what it gets.

        Raises:
            InvalidRequest: the prompt does not fit.
            Unavailable: the engine drains or has stopped.
        """
        ...

    def cut(self) -> None:
        """Stops what is under way. All of it has been told, with ``Completion.cut``, when this returns."""
        ...

    def check(self) -> None:
        """Raises DeadlineExceeded if the time is up, Unavailable if the engine has stopped."""
        ...


class RolloutSource(Protocol):
    """The engine as a sampler. Its rollouts share steps with users' requests and give way to them."""

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises InvalidRequest if a completion of ``max_tokens`` does not fit the engine's context behind a prompt."""
        ...

    def policy(
        self, lora: LoraParams, interrupt: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[PrivatePolicy]:
        """Copies an adapter, as it is now, into a slot of the engine for as long as the block runs.

        Not inside the compute gate. ``interrupt`` may raise while a slot is waited for.

        Raises:
            Overloaded: no slot became free.
        """
        ...

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
        """One completion a request, in their order. Blocks; not inside the compute gate.

        Args:
            cut: told after steps of the engine, on its thread, how many have ended. Once it says so the others are
                stopped as they are, some perhaps without a token: see ``Completion.cut``. Without other traffic the
                same rule cuts the same requests at the same tokens.
            gentle: users' time between tokens comes before the speed of this: few are in the engine beside them.
            interrupt: called several times a second and may raise: what is left is aborted.
            deadline: time.monotonic() seconds; None: the pod's setting from now.

        Raises:
            InvalidRequest: a prompt does not fit.
            ModelNotFound: the version does not exist.
            DeadlineExceeded: the engine did not get to it in time.
            Unavailable: the engine drains or has stopped.
            TemperError: a step failed.
        """
        ...

    def stream(
        self, temperature: float, stop_token_ids: frozenset[int], policy: Policy
    ) -> AbstractContextManager[RolloutStream]:
        """A stream of completions by one policy, for as long as the block runs: what is under way then is aborted."""
        ...

    def score(
        self,
        requests: Sequence[ScoreRequest],
        policy: Policy,
        *,
        interrupt: Callable[[], None] = lambda: None,
        deadline: float | None = None,
    ) -> list[array[float]]:
        """The log-probabilities of given completions, in their order, each as ``Completion.logprobs``.

        The engine takes their tokens one by one where ``generate`` draws them: the same scheduler, kernels, adapter
        slot and sampler. Where its kernels do not depend on the batch, what it says of a completion that ``generate``
        sampled under the same policy is what it said then, to the bit; elsewhere if the same requests are in each
        step, i.e. for the same completions in the same order with no other traffic.

        Blocks, is interrupted and raises as ``generate``.

        Raises:
            InvalidRequest: a completion does not fit, or has a token id outside the vocabulary.
        """
        ...

    def likelihoods(
        self,
        requests: Sequence[ScoreRequest],
        policy: Policy,
        *,
        interrupt: Callable[[], None] = lambda: None,
        deadline: float | None = None,
    ) -> list[float]:
        """The log-likelihood of each completion behind its prompt, in nats, at temperature 1; gentle. Of a completion
        without a prompt the first token has none.

        Completions are read as prompts are, many tokens a step, and what is before them may come from the prefix cache;
        bits are not those of ``score``. Blocks, is interrupted and raises as ``score``.
        """
        ...


def sample(
    source: RolloutSource,
    lora: LoraParams,
    requests: Sequence[RolloutRequest],
    sampling: RolloutSampling,
    watch: StepTimer,
    interrupt: Callable[[], None],
    cut: Callable[[int], bool] | None = None,
) -> list[Completion]:
    """Completions by an adapter as it is now, in the parts ``swap`` and ``rollout``. The engine is asked for nothing if
    there are no requests. ``cut`` is that of RolloutSource.generate. Raises like RolloutSource."""
    with ExitStack() as stack:
        with watch.waiting("swap"):
            policy = stack.enter_context(source.policy(lora, interrupt)) if requests else None
        with watch.waiting("rollout"):
            return source.generate(requests, sampling, policy, interrupt=interrupt, cut=cut) if requests else []


def sampling_rate(tokens: int, watch: StepTimer) -> dict[str, float]:
    """Metric of the speed at which sample() brought so many tokens."""
    return {"rollout_tokens_per_second": tokens / max(watch.waited("rollout"), 1e-9)}
