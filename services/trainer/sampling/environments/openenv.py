"""Client of OpenEnv servers (openenv-core 0.3): JSON messages over a WebSocket, a connection an episode.

Nothing is asked twice on a connection: whether a step without an answer was taken is not known, so an episode that
misses one begins again in a fresh environment. So does one that is told more than it asked for: answers have no
numbers, and the next one would be taken for that of another step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI, PayloadTooBig

from services.common.jobs.kinds.environment import EnvironmentReward, FailureKind
from services.common.jobs.scorers.allowed_webhooks import Webhooks, check_covered
from services.trainer.sampling.answers import ReadAnswer
from services.trainer.sampling.environments.world import (
    MOST_BYTES,
    CallCheck,
    EnvironmentFailed,
    Outcome,
    error_text,
    parse_json,
    reward_of,
    tool_message,
    user_message,
)

_TOO_BIG = 1009
"""Close code of a message over the limit (RFC 6455)."""
_CLOSE_SECONDS = 2.0
_EPISODE_NAME = "episode_id"
"""Member of a state by which a server tells episodes apart."""
_TEXT_FIELDS = ("text", "message", "result", "error")
"""Fields that are read, the first that says something, unless the job names one."""


class _Connect(connect):
    """A connection that goes where it was told to: redirects would lead past the list of the operator."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class OpenEnvWorlds:
    """Sessions of one server.

    Args:
        webhooks: what the operator allows; its list of addresses was checked.

    Raises:
        InvalidRequest: the URL is not allowed.
    """

    def __init__(self, spec: EnvironmentReward, webhooks: Webhooks, where: str) -> None:
        if spec.url is None:
            raise ValueError("an environment without a URL is no server")
        check_covered(spec.url, where, webhooks.allowed)
        self._spec = spec
        self._url = socket_url(spec.url)
        self._tls = webhooks.tls
        self._key = webhooks.key_of(spec.url)

    @contextlib.asynccontextmanager
    async def open(self, tools: Sequence[Mapping[str, Any]]) -> AsyncIterator[OpenEnvWorld]:
        """See Worlds.open."""
        timeout = self._spec.timeout_seconds
        try:
            async with asyncio.timeout(timeout):
                socket = await _Connect(
                    self._url,
                    open_timeout=None,
                    # A small message that unpacks to a large one would get around the limit.
                    compression=None,
                    # Proxies of the environment are nobody's choice for this.
                    proxy=None,
                    max_size=MOST_BYTES,
                    close_timeout=_CLOSE_SECONDS,
                    ping_interval=None,
                    additional_headers=None if self._key is None else {"Authorization": f"Bearer {self._key}"},
                    ssl=(self._tls or True) if self._url.startswith("wss:") else None,
                )
        except TimeoutError as error:
            raise EnvironmentFailed(FailureKind.TIMEOUT, f"no connection within {timeout:g} s") from error
        except (OSError, InvalidHandshake, InvalidURI, EOFError) as error:
            raise EnvironmentFailed(
                FailureKind.CONNECTION, f"no connection: {type(error).__name__}: {error}"
            ) from error
        try:
            yield OpenEnvWorld(Session(socket, timeout), self._spec, CallCheck(tools))
            await _say_goodbye(socket)
        finally:
            # Also where it failed, or nobody waits any more: then there is nothing left to say.
            socket.transport.abort()


class Session:
    """The protocol on an open connection; one question at a time."""

    def __init__(self, socket: ClientConnection, timeout: float) -> None:
        self._socket = socket
        self._timeout = timeout

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """The data of the answer to a message.

        Raises:
            Refused: the environment cannot take this action, or tells no state, and is as it was.
            EnvironmentFailed: there is no answer that can be used.
        """
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(self._timeout):
                if (unasked := await self._waiting()) is not None:
                    raise _unasked(unasked, kind)
                # A server that is full says so unasked, and closes.
                with contextlib.suppress(ConnectionClosed):
                    await self._socket.send(json.dumps(message))
                raw = await self._socket.recv()
        except TimeoutError as error:
            raise EnvironmentFailed(FailureKind.TIMEOUT, f"no answer to {kind} within {self._timeout:g} s") from error
        except PayloadTooBig as error:
            raise _oversized() from error
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == _TOO_BIG:
                raise _oversized() from error
            raise EnvironmentFailed(FailureKind.CONNECTION, f"the connection ended at {kind}: {error}") from error
        return _data(parse_json(raw), kind)

    async def _waiting(self) -> str | bytes | None:
        """A message that came before the next question; None: there is none."""
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(0):
                return await self._socket.recv()
        return None


class Refused(Exception):
    """A message that the environment says it cannot take."""


def _oversized() -> EnvironmentFailed:
    return EnvironmentFailed(FailureKind.OVERSIZED, f"a message of over {MOST_BYTES} bytes")


def _unasked(raw: str | bytes, kind: str) -> EnvironmentFailed:
    """Failure of a server that speaks unasked: that it is full, or crashed, or anything else."""
    try:
        _data(parse_json(raw), "reset")
    except EnvironmentFailed as said:
        return said
    return EnvironmentFailed(FailureKind.PROTOCOL, f"it answered before it was asked for {kind}")


def _data(answer: Any, asked: str) -> Mapping[str, Any]:
    expected = "state" if asked == "state" else "observation"
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict):
        raise EnvironmentFailed(FailureKind.PROTOCOL, "an answer without an object of data")
    if answer.get("type") == "error":
        code, message = str(data.get("code")), str(data.get("message"))
        full = code == "CAPACITY_REACHED"
        # An environment that cannot tell its state can be acted in all the same.
        if (asked == "step" and code == "VALIDATION_ERROR") or (asked == "state" and not full):
            raise Refused(message)
        raise EnvironmentFailed(FailureKind.CAPACITY if full else FailureKind.ERROR, f"{code}: {message}")
    if answer.get("type") != expected:
        raise EnvironmentFailed(
            FailureKind.PROTOCOL, f"the answer to {asked} is of type {str(answer.get('type'))[:40]!r}"
        )
    return data


class OpenEnvWorld:
    """A session as the world of one episode."""

    def __init__(self, session: Session, spec: EnvironmentReward, calls: CallCheck) -> None:
        self._session = session
        self._spec = spec
        self._calls = calls

    async def begin(self, params: Mapping[str, Any]) -> str:
        """See World.begin."""
        text, _, done = self._told(await self._session.ask("reset", params))
        if done:
            raise EnvironmentFailed(FailureKind.PROTOCOL, "the episode is over at its reset")
        return text

    async def state(self) -> str:
        """See World.state."""
        try:
            told = await self._session.ask("state")
        except Refused:
            return ""
        known = {name: value for name, value in told.items() if name != _EPISODE_NAME}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    async def act(self, answer: ReadAnswer) -> Outcome:
        """See World.act. Calls are made one after another, until one ends the episode."""
        if answer.broken:
            return Outcome([tool_message(error_text("the call is not complete"))])
        if not answer.calls:
            return await self._say(answer.text)
        messages, reward = [], 0.0
        for call in answer.calls:
            wrong = self._calls.wrong(call)
            if wrong is not None:
                messages.append(tool_message(error_text(wrong)))
                continue
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            text, gained, done = await self._step(action)
            reward += gained
            if done:
                return Outcome((), reward, done=True)
            messages.append(tool_message(text))
        return Outcome(messages, reward)

    async def _say(self, text: str) -> Outcome:
        if self._spec.message_field is None:
            return Outcome(done=True)
        told, reward, done = await self._step({self._spec.message_field: text})
        return Outcome((), reward, done=True) if done else Outcome([user_message(told)], reward)

    async def _step(self, action: Mapping[str, Any]) -> tuple[str, float, bool]:
        try:
            return self._told(await self._session.ask("step", action))
        except Refused as error:
            return error_text(str(error)), 0.0, False

    def _told(self, data: Mapping[str, Any]) -> tuple[str, float, bool]:
        """Text, reward, and whether it is the end."""
        observation, done = data.get("observation"), data.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise EnvironmentFailed(FailureKind.PROTOCOL, "an observation is an object, and done true or false")
        return self._text(observation), reward_of(data.get("reward")), done

    def _text(self, observation: Mapping[str, Any]) -> str:
        named = self._spec.observation_field
        if named is not None and named not in observation:
            raise EnvironmentFailed(FailureKind.PROTOCOL, f"an observation without {named}")
        fields = _TEXT_FIELDS if named is None else (named,)
        found = next((observation[name] for name in fields if observation.get(name) not in (None, "")), None)
        if found is None:
            found = "" if named is not None or not any(observation.values()) else dict(observation)
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def socket_url(url: str) -> str:
    """Address of the WebSocket of a server."""
    parts = urllib.parse.urlsplit(url)
    path = f"{parts.path.rstrip('/')}/ws"
    return parts._replace(scheme="ws" + parts.scheme.removeprefix("http"), path=path).geturl()


async def _say_goodbye(socket: ClientConnection) -> None:
    """Ends the session; the server closes the connection."""
    with contextlib.suppress(ConnectionClosed, TimeoutError, OSError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await socket.send(json.dumps({"type": "close"}))
            await socket.wait_closed()
