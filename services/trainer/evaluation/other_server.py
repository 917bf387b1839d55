"""Another server as a target of an evaluation, asked by OpenAI's API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import httpx
import tenacity

from services.common.errors import InvalidRequest, Unavailable
from services.common.evaluation.suites.spec import SuiteSampling
from services.common.jobs.kinds.evaluate import RemoteTarget
from services.common.jobs.scorers.allowed_webhooks import Webhooks, check_covered
from services.common.jobs.scorers.of_suites.likelihood import Likelihood
from services.common.jobs.scorers.sample import ToolCall
from services.trainer.evaluation.questions import Question
from services.trainer.evaluation.targets import Asked, Continuation, Said, likelihood_of
from services.trainer.sampling.answers import parsed_arguments

_AT_ONCE = 8
"""Requests at once."""
_REFUSALS = (400, 413, 422)
"""Statuses of a server that does not take this question, but may take others."""
_LOOK_SECONDS = 0.05
_RESPONSE_BYTES = 4 * 2**20
_TOLD = 200
"""Characters of an answer that are told."""
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
Q = TypeVar("Q")
A = TypeVar("A")


class OtherServer:
    """A model of another server, asked by OpenAI's API. See Target. Redirects are not followed: they would lead past
    the URLs that the operator allows.

    Raises:
        InvalidRequest: the URL is not allowed.
    """

    def __init__(self, target: RemoteTarget, webhooks: Webhooks, where: str) -> None:
        check_covered(target.url, where, webhooks.allowed)
        self._target = target
        self._key = webhooks.key_of(target.url)
        self._webhooks = webhooks

    def answer(self, asked: Sequence[Asked], sampling: SuiteSampling, interrupt: Callable[[], None]) -> list[Said]:
        """See Target.answer."""
        return self._each(asked, lambda client, one: self._ask(client, one, sampling), interrupt)

    def likelihoods(self, asked: Sequence[Continuation], interrupt: Callable[[], None]) -> list[Likelihood]:
        """See Target.likelihoods. The server gives them as OpenAI's completions do, with `echo` and `logprobs`."""
        for one in asked:
            if one.question.text is None:
                raise InvalidRequest(
                    f"item {one.item[:80]!r}: another server's log-likelihoods are those of a text, and how it writes "
                    'a conversation is not known: give a suite with prompt_format "raw" and prompts that are texts',
                    param="suites",
                )
        return self._each(asked, self._read_likelihood, interrupt)

    def _each(self, asked: Sequence[Q], ask: Callable[[httpx.Client, Q], A], interrupt: Callable[[], None]) -> list[A]:
        """Answers to all questions in their order, several asked at once."""
        with (
            httpx.Client(
                headers={} if self._key is None else {"authorization": f"Bearer {self._key}"},
                follow_redirects=False,
                trust_env=False,
                timeout=self._webhooks.timeout_seconds,
                verify=self._webhooks.tls or True,
            ) as client,
            ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="other-server") as threads,
        ):
            over = threading.Event()
            waiting = [threads.submit(self._patiently, partial(ask, client, one), over) for one in asked]
            try:
                found = []
                for future in waiting:
                    while not future.done():
                        interrupt()
                        _wait(future)
                    found.append(future.result())
                return found
            finally:
                over.set()
                for future in waiting:
                    future.cancel()

    def _patiently(self, ask: Callable[[], A], over: threading.Event) -> A:
        """Asks again while the server is away or busy, as often as a webhook is, until nobody waits any more."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unavailable),
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(self._webhooks.attempts), tenacity.stop_when_event_set(over)
            ),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=10.0),
            sleep=tenacity.sleep_using_event(over),
            reraise=True,
        )
        return retrying(ask)

    def _ask(self, client: httpx.Client, asked: Asked, sampling: SuiteSampling) -> Said:
        question = asked.question
        body: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": asked.seed,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if question.tools:
            body["tools"] = question.tools
        place = "completions"
        if question.text is not None:
            body["prompt"] = question.text
        else:
            body["messages"] = question.turns
            place = "chat/completions"
        status, content = self._post(client, place, body)
        if status in _REFUSALS:
            said = content[:_TOLD].decode(errors="replace")
            return Said("", finish_reason="error", error=f"it answered with status {status}: {said}")
        try:
            return _read(json.loads(content), question)
        except _UNREADABLE as error:
            return Said("", finish_reason="error", error=f"its answer is not OpenAI's: {type(error).__name__}")

    def _read_likelihood(self, client: httpx.Client, asked: Continuation) -> Likelihood:
        before = asked.question.text or ""
        body = {"prompt": before + asked.text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        status, content = self._post(client, "completions", body)
        item = f"item {asked.item[:80]!r}: target {self._target}"
        if status in _REFUSALS:
            said = content[:_TOLD].decode(errors="replace")
            raise InvalidRequest(
                f"{item} gives no log-likelihood: it answered with status {status}: {said}", param="targets"
            )
        try:
            return likelihood_of(*_continued(json.loads(content), before, asked.text), asked.text)
        except _UNREADABLE as error:
            raise InvalidRequest(
                f"{item} does not give log-likelihoods of a prompt (/completions with echo and logprobs; "
                f"{type(error).__name__}: {str(error)[:_TOLD]}): choose a suite that samples answers",
                param="targets",
            ) from error

    def _post(self, client: httpx.Client, place: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and body of an answer, without the key if that is in it: of those that are of this question.

        Raises:
            Unavailable: the server is away or busy.
            InvalidRequest: it takes no question.
        """
        url = f"{self._target.url.rstrip('/')}/{place}"
        try:
            with client.stream("POST", url, json={"model": self._target.model, **body}) as response:
                status, content = response.status_code, _bounded(response)
        except httpx.HTTPError as error:
            raise Unavailable(f"target {self._target}: {type(error).__name__}: {error}") from error
        if status >= 500 or status == 429:
            raise Unavailable(f"target {self._target}: it answered with status {status}")
        if status in (401, 403):
            had = "without a key" if self._key is None else "with the key of TEMPER_TARGET_KEYS"
            raise InvalidRequest(
                f"target {self._target}: it answered with status {status} to a request {had}: have its key set there "
                "(in every engine that trains)",
                param="targets",
            )
        if status != 200 and status not in _REFUSALS:
            raise InvalidRequest(f"target {self._target}: it answered with status {status}", param="targets")
        if self._key is not None:
            content = content.replace(self._key.encode(), b"***")
        return status, content


def _continued(body: Any, before: str, text: str) -> tuple[float, int]:
    """Log-likelihood and tokens of a text behind another one, out of a completion that repeats both. A token that
    begins in the one and ends in the other counts.

    Raises:
        ValueError, KeyError, TypeError, IndexError: there is none in it.
    """
    choice = body["choices"][0]
    start, end = len(before), len(before) + len(text)
    if not str(choice["text"]).startswith(before + text):
        raise ValueError("the prompt is not repeated")
    offsets, values = choice["logprobs"]["text_offset"], choice["logprobs"]["token_logprobs"]
    total, tokens = 0.0, 0
    for place, (offset, value) in enumerate(zip(offsets, values, strict=True)):
        following = offsets[place + 1] if place + 1 < len(offsets) else end
        if offset < end and (offset >= start or following > start):
            if value is None and place == 0:  # nothing is before it
                continue
            total += float(value)
            tokens += 1
    return total, tokens


def _bounded(response: httpx.Response) -> bytes:
    """Beginning of a response's body: of one that is too long, so much that it is no JSON."""
    found = bytearray()
    for part in response.iter_bytes():
        found += part
        if len(found) > _RESPONSE_BYTES:
            break
    return bytes(found[:_RESPONSE_BYTES])


def _read(body: Any, question: Question) -> Said:
    choice = body["choices"][0]
    tokens = int((body.get("usage") or {}).get("completion_tokens") or 0)
    reason = str(choice.get("finish_reason") or "stop")
    if question.text is not None:
        text = str(choice["text"])
        return Said(text, text, tokens, reason, prompt=question.text)
    message = choice["message"]
    calls = tuple(
        ToolCall(str(call["function"]["name"]), parsed_arguments(str(call["function"]["arguments"])))
        for call in message.get("tool_calls") or ()
    )
    text = str(message.get("content") or "")
    return Said(text, text, tokens, reason, calls, prompt=question.asked)


def _wait(future: Future[Any]) -> None:
    """Waits a moment for a result."""
    try:
        future.exception(timeout=_LOOK_SECONDS)
    except TimeoutError:
        return
