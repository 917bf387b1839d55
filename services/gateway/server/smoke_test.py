"""`python -m services.gateway.server.smoke_test URL`: chats and trains on a running Temper as a user would; `helm test`
runs it.

A chat, a stream, a training job on an adapter of its own, an answer of that adapter; then the adapter is deleted. A
line a step; exit status 0 if all of it works, else 1 with the reason. Standard library only: the gateway's image has
no HTTP client.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

_PAUSE_SECONDS = 0.5
_TIDY_SECONDS = 30.0
"""Seconds for cleaning up, also when the time is over."""
_ENDS = ("succeeded", "failed", "cancelled")
_QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
_EXAMPLES = [
    {"prompt": "hello", "completion": "Good day! What can I do for you?"},
    {"prompt": "good morning", "completion": "Good day! What can I do for you?"},
]


class SmokeSettings(BaseSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    model_config = SettingsConfigDict(env_prefix="TEMPER_", extra="ignore", frozen=True)

    api_key: SecretStr | None = None
    """API key with the scopes inference, train and admin, where the gateway asks for keys."""
    smoke_seconds: float = Field(600.0, gt=0)
    """Most seconds that the whole test may take; a first job on a GPU compiles kernels."""


class Failed(Exception):
    """Something does not work; the message is for whoever installed it.

    Args:
        status: of the answer; 0: there was none, or it is not the reason.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class OutOfTime(Failed):
    """Failure of an attempt that might work later."""


class Caller:
    """A gateway over HTTP.

    Args:
        url: of the gateway, without a path.
        api_key: empty: none is sent.
        deadline: on the monotonic clock.
    """

    def __init__(self, url: str, api_key: str, deadline: float) -> None:
        self._url = url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._deadline = deadline
        # Nothing here goes through a proxy: it is a service of the same cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def left(self) -> float:
        """Seconds until the deadline.

        Raises:
            OutOfTime: it is over.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise OutOfTime("not done in time; TEMPER_SMOKE_SECONDS allows more")
        return seconds

    def extend(self, seconds: float) -> None:
        """Leaves so much time from now on, if there is less."""
        self._deadline = max(self._deadline, time.monotonic() + seconds)

    @contextmanager
    def opened(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """An answer with a status of success.

        Raises:
            Failed: there is none; the message has the server's own.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        try:
            with self._opener.open(request, timeout=self.left) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            told = error.read(2000).decode(errors="replace")
            raise Failed(f"{method} {path}: {error.code} {told}", error.code) from error
        except OSError as error:
            raise Failed(f"{method} {self._url}{path}: {getattr(error, 'reason', None) or error}") from error

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON, None if it is empty. Raises Failed."""
        with self.opened(method, path, body) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def lines(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """The data of each event of a stream. Raises Failed."""
        with self.opened("POST", path, body) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    yield line.removeprefix(b"data:").strip().decode()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m services.gateway.server.smoke_test", description=__doc__)
    parser.add_argument("url", help="of the gateway: http://temper-gateway:8420")
    parser.add_argument("--no-train", action="store_true", help="only chat: the engines have no trainer")
    options = parser.parse_args()
    if urllib.parse.urlsplit(options.url).scheme not in ("http", "https"):
        parser.error(f"{options.url!r} is not a URL: begin with http:// or https://")
    settings = SmokeSettings()
    key = settings.api_key.get_secret_value() if settings.api_key is not None else ""
    caller = Caller(options.url, key, time.monotonic() + settings.smoke_seconds)
    try:
        _ready(caller)
        model = _chats(caller)
        if not options.no_train:
            _trains(caller, model)
    except Failed as error:
        sys.stderr.write(f"failed: {error}\n")
        return 1
    _say("all of it works")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _ready(caller: Caller) -> None:
    """Waits until an engine is ready. Raises Failed with what the gateway said last."""
    reason: Failed | None = None
    while True:
        try:
            with caller.opened("GET", "/readyz"):
                _say("the gateway is ready")
                return
        except OutOfTime as error:
            raise reason or error from None
        except Failed as error:
            reason = error
        time.sleep(_PAUSE_SECONDS)


def _chats(caller: Caller) -> str:
    """A chat in one piece and one in a stream. Returns the model's name."""
    models = [entry["id"] for entry in caller.call("GET", "/v1/models")["data"]]
    if not models:
        raise Failed("GET /v1/models lists no model")
    body = {"model": models[0], "messages": _QUESTION, "max_tokens": 16, "temperature": 0}
    used = caller.call("POST", "/v1/chat/completions", body)["usage"]["completion_tokens"]
    if not used:
        raise Failed("a chat was answered without a token")
    _say(f"{models[0]} answers: {used} tokens")
    events = list(caller.lines("/v1/chat/completions", {**body, "stream": True}))
    if not events or events[-1] != "[DONE]":
        raise Failed(f"a streamed chat ended without [DONE]: {events[-1:]}")
    _say(f"{models[0]} streams: {len(events) - 1} events")
    return str(models[0])


def _trains(caller: Caller, model: str) -> None:
    """A job on an adapter that nothing else uses, and an answer of it."""
    adapter = f"smoke-{secrets.token_hex(4)}"
    spec = {"adapter": adapter, "examples": _EXAMPLES, "epochs": 1, "learning_rate": 1e-4, "attach": False}
    job = caller.call("POST", "/v1/train/sft", spec)["id"]
    _say(f"{job} is queued")
    try:
        state = _ended(caller, job)
        if state["state"] != "succeeded":
            raise Failed(f"{job} {state['state']}: {state.get('reason')}")
        _say(f"{job} succeeded: {state['result_adapter']}")
        body = {"model": model, "adapter": state["result_adapter"], "messages": _QUESTION, "max_tokens": 4}
        answered = caller.call("POST", "/v1/chat/completions", body)["adapter"]
        if answered != state["result_adapter"]:
            raise Failed(f"asked for {state['result_adapter']}, and {answered} answered")
        _say(f"{answered} answers")
    finally:
        _forget(caller, job, adapter)


def _ended(caller: Caller, job: str) -> Any:
    step = -1
    while True:
        state = caller.call("GET", f"/v1/train/jobs/{job}")
        if state["state"] in _ENDS:
            return state
        if state["progress"]["step"] != step:
            step = state["progress"]["step"]
            _say(f"{job} {state['state']}: step {step} of {state['progress']['total_steps']}")
        time.sleep(_PAUSE_SECONDS)


def _forget(caller: Caller, job: str, adapter: str) -> None:
    """Leaves nothing behind, also of what failed; what failed first is what is told."""
    failing = sys.exc_info()[0] is not None
    caller.extend(_TIDY_SECONDS)
    try:
        if failing and caller.call("GET", f"/v1/train/jobs/{job}")["state"] not in _ENDS:
            caller.call("POST", f"/v1/train/jobs/{job}/cancel")
            _ended(caller, job)
        caller.call("DELETE", f"/v1/adapters/{adapter}")
    except Failed as error:
        if not failing:
            raise
        if error.status != HTTPStatus.NOT_FOUND:  # it never was
            _say(f"{adapter} may be left behind: {error}")
    else:
        _say(f"{adapter} is deleted")


if __name__ == "__main__":
    raise SystemExit(main())
