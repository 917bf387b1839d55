"""Targets of an evaluation: who answers, and the engine beside the trainer with one of its policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import InvalidRequest, TemperError
from services.common.evaluation.suites.spec import SuiteSampling
from services.common.jobs.scorers.of_suites.likelihood import Likelihood
from services.common.jobs.scorers.sample import ToolCall
from services.common.text.stops import Stops
from services.common.text.tokenizer import TextCodec
from services.trainer.evaluation.questions import Question
from services.trainer.host.rollouts import (
    Completion,
    Policy,
    RolloutRequest,
    RolloutSampling,
    RolloutSource,
    ScoreRequest,
)
from services.trainer.sampling.answers import read_answer

_DIGITS = 5
"""Digits of a log-likelihood behind the point: which requests shared a step, which moves the last bits, is no part of a
result."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a target answered to a question."""

    text: str
    """The answer as a user would read it, without reasoning and calls of tools."""
    whole: str = ""
    """All of it."""
    tokens: int = 0
    finish_reason: str = "stop"
    tool_calls: tuple[ToolCall, ...] = ()
    prompt: str = ""
    """The prompt as the model read it."""
    error: str | None = None
    """Reason why there is no answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the seed of its answer."""

    question: Question
    seed: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text behind a question, whose log-likelihood is needed."""

    item: str
    """Id of the item, for messages."""
    question: Question
    text: str


class Target(Protocol):
    """Somebody who answers."""

    def answer(self, asked: Sequence[Asked], sampling: SuiteSampling, interrupt: Callable[[], None]) -> list[Said]:
        """An answer a question, in their order. A question that the target refuses has an error as its answer.

        Raises:
            ModelNotFound: the version does not exist any more.
            Unavailable: the target does not answer; and what ``interrupt`` raises.
        """
        ...

    def likelihoods(self, asked: Sequence[Continuation], interrupt: Callable[[], None]) -> list[Likelihood]:
        """Log-likelihoods of texts, in their order.

        Raises:
            InvalidRequest: one cannot be given; its item is named.
            ModelNotFound, Unavailable: see ``answer``.
        """
        ...


class EngineTarget:
    """The engine beside the trainer, with a version of an adapter or without one. See Target."""

    def __init__(self, rollouts: RolloutSource, codec: TextCodec, policy: Policy) -> None:
        self._rollouts = rollouts
        self._codec = codec
        self._policy = policy

    def answer(self, asked: Sequence[Asked], sampling: SuiteSampling, interrupt: Callable[[], None]) -> list[Said]:
        """See Target.answer."""
        prompts = [self._prompt(one.question, sampling.max_tokens) for one in asked]
        requests = [
            RolloutRequest(prompt, one.seed)
            for prompt, one in zip(prompts, asked, strict=True)
            if not isinstance(prompt, Said)
        ]
        chosen = RolloutSampling(sampling.temperature, sampling.max_tokens, top_p=sampling.top_p)
        completions = iter(
            self._rollouts.generate(requests, chosen, self._policy, interrupt=interrupt, gentle=True)
            if requests
            else ()
        )
        return [
            prompt if isinstance(prompt, Said) else self._said(one.question, prompt, next(completions), sampling.stop)
            for prompt, one in zip(prompts, asked, strict=True)
        ]

    def likelihoods(self, asked: Sequence[Continuation], interrupt: Callable[[], None]) -> list[Likelihood]:
        """See Target.likelihoods."""
        requests = [self._request(one) for one in asked]
        found = self._rollouts.likelihoods(requests, self._policy, interrupt=interrupt)
        return [
            likelihood_of(value, _counted(request), one.text)
            for one, request, value in zip(asked, requests, found, strict=True)
        ]

    def _request(self, asked: Continuation) -> ScoreRequest:
        question = asked.question
        try:
            prompt = () if question.text == "" else question.tokens(self._codec)
            request = ScoreRequest(prompt, question.continuation(self._codec, asked.text), 1.0)
            self._rollouts.check(len(request.prompt) + len(request.completion), 1)
            if _counted(request) < 1:
                raise InvalidRequest("a single token with nothing before it has no log-likelihood")
        except TemperError as error:
            raise InvalidRequest(f"item {asked.item[:80]!r}: {error.message}", param="suites") from error
        return request

    def _prompt(self, question: Question, max_tokens: int) -> tuple[int, ...] | Said:
        """Tokens of a question, or why it cannot be asked."""
        try:
            tokens = question.tokens(self._codec)
            self._rollouts.check(len(tokens), max_tokens)
        except InvalidRequest as error:
            return Said("", finish_reason="error", error=error.message)
        return tokens

    def _said(self, question: Question, prompt: tuple[int, ...], completion: Completion, stop: Sequence[str]) -> Said:
        codec, tokens = self._codec, completion.token_ids
        asked = codec.decode(prompt, skip_special=False)
        if question.text is not None:
            body = tokens if completion.truncated or tokens[-1] not in codec.special_ids else tokens[:-1]
            whole = codec.decode(body)
            text = _cut(whole, stop)
            ended = not completion.truncated or text != whole
            return Said(text, whole, len(tokens), "stop" if ended else "length", prompt=asked)
        found = read_answer(codec, prompt, completion, question.tools, Stops(stop) if stop else None)
        reason = "stop" if found.stopped or not completion.truncated else "length"
        if reason == "stop" and found.calls and not found.broken:
            reason = "tool_calls"
        return Said(found.text, found.whole, len(tokens), reason, found.calls, asked)


def likelihood_of(logprob: float, tokens: int, text: str) -> Likelihood:
    """Log-likelihood of a text."""
    return Likelihood(min(0.0, round(logprob, _DIGITS)), tokens, len(text.encode()))


def _counted(request: ScoreRequest) -> int:
    """Tokens of the completion that have a probability: without a prompt the first one has none."""
    return len(request.completion) - (0 if request.prompt else 1)


def _cut(text: str, stop: Sequence[str]) -> str:
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text
