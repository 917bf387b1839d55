"""Another server as a target of an evaluation, asked by OpenAI's API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import tenacity

from services.common.errors import InvalidRequest, Unavailable
from services.common.evaluation.suites.spec import SuiteSampling
from services.common.jobs.kinds.evaluate import RemoteTarget
from services.common.jobs.scorers.allowed_webhooks import Webhooks, check_covered
from services.common.jobs.scorers.sample import ToolCall
from services.trainer.evaluation.questions import Question
from services.trainer.evaluation.targets import Asked, Said, parsed_arguments

_AT_ONCE = 8
"""Requests at once."""
_REFUSALS = (400, 413, 422)
"""Statuses of a server that does not take this question, but may take others."""
_LOOK_SECONDS = 0.05
_RESPONSE_BYTES = 4 * 2**20


class OtherServer:
    """A model of another server, asked by OpenAI's API. See Target. Redirects are not followed: they would lead past
    the URLs that the operator allows.

    Raises:
        InvalidRequest: the URL is not allowed.
    """

    def __init__(self, target: RemoteTarget, webhooks: Webhooks, where: str) -> None:
        check_covered(target.url, where, webhooks.allowed)
        self._target = target
        self._webhooks = webhooks

    def answer(self, asked: Sequence[Asked], sampling: SuiteSampling, interrupt: Callable[[], None]) -> list[Said]:
        """See Target.answer."""
        with (
            httpx.Client(
                follow_redirects=False,
                trust_env=False,
                timeout=self._webhooks.timeout_seconds,
                verify=self._webhooks.tls or True,
            ) as client,
            ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="other-server") as threads,
        ):
            over = threading.Event()
            waiting = [threads.submit(self._patiently, client, one, sampling, over) for one in asked]
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

    def _patiently(self, client: httpx.Client, asked: Asked, sampling: SuiteSampling, over: threading.Event) -> Said:
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
        return retrying(self._ask, client, asked, sampling)

    def _ask(self, client: httpx.Client, asked: Asked, sampling: SuiteSampling) -> Said:
        question = asked.question
        body: dict[str, Any] = {
            "model": self._target.model,
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
        try:
            with client.stream("POST", f"{self._target.url.rstrip('/')}/{place}", json=body) as response:
                status, content = response.status_code, _bounded(response)
        except httpx.HTTPError as error:
            raise Unavailable(f"target {self._target}: {type(error).__name__}: {error}") from error
        if status >= 500 or status == 429:
            raise Unavailable(f"target {self._target}: it answered with status {status}")
        if status in _REFUSALS:
            said = content[:200].decode(errors="replace")
            return Said("", finish_reason="error", error=f"it answered with status {status}: {said}")
        if status != 200:
            raise InvalidRequest(f"target {self._target}: it answered with status {status}", param="targets")
        try:
            return _read(json.loads(content), question)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            return Said("", finish_reason="error", error=f"its answer is not OpenAI's: {type(error).__name__}")


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


def _wait(future: Future[Said]) -> None:
    """Waits a moment for a result."""
    try:
        future.exception(timeout=_LOOK_SECONDS)
    except TimeoutError:
        return
