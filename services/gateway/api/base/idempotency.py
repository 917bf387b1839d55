"""Idempotency-Key: a request that is sent twice happens once, and gets the same answer for a day.

Follows draft-ietf-httpapi-idempotency-key-header-07, except that another body under a used key is a 409, as it is for
training jobs. Only answers of success are kept: a refused request has changed nothing, so its key is free again. While
the first request runs, a second gets 409 with Retry-After. Keys belong to their principal; so do those of training
jobs, which the queue keeps.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import structlog
from fastapi import Depends, Header, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import to_json

from services.common.errors import Conflict, InProgress, Unavailable
from services.common.settings import CommonSettings
from services.common.shutdown import cancel_and_wait
from services.common.storage.redis import call_async, connect_async
from services.gateway.api.base.routing import resource_of
from services.gateway.auth.caller import principal_of

log = structlog.get_logger(__name__)
KEEP_SECONDS = 86400
CLAIM_SECONDS = 30
"""Seconds that a claim lasts after the last renewal by the gateway that answers the request; then the request may be
sent again."""
_KEPT_HEADERS = ("location", "content-type", "x-temper-adapter", "x-temper-canary")

Work = Callable[[], Awaitable[Response]]
IdempotencyKey = Annotated[
    str | None,
    Header(alias="idempotency-key", min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$"),
]


@dataclass(frozen=True, slots=True)
class Answer:
    """Kept answer of a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    def pack(self) -> str:
        return json.dumps([self.status, self.headers, self.body.decode()])

    @classmethod
    def unpack(cls, text: str) -> Answer:
        status, headers, body = json.loads(text)
        return cls(status, headers, body.encode())


class Records(Protocol):
    """Store of claimed keys and kept answers. Every method may raise Unavailable."""

    async def claim(self, key: str, sha: str, token: str) -> tuple[str, str]:
        """Claims a key, and returns its state: ("new", ""), ("running", ""), ("other", "") if another request has it,
        or ("done", the packed answer)."""
        ...

    async def renew(self, key: str, token: str) -> None:
        """Renews the claim of a request that still runs."""
        ...

    async def finish(self, key: str, token: str, answer: str) -> None:
        """Keeps the answer of a request."""
        ...

    async def abandon(self, key: str, token: str) -> None:
        """Frees the key of a request that has changed nothing."""
        ...

    async def aclose(self) -> None: ...


_CLAIM = f"""
-- KEYS record; ARGV sha token
local known = redis.call('HMGET', KEYS[1], 'sha', 'answer', 'token')
if not known[1] then
  redis.call('HSET', KEYS[1], 'sha', ARGV[1], 'token', ARGV[2])
  redis.call('EXPIRE', KEYS[1], {CLAIM_SECONDS})
  return {{'new', ''}}
end
if known[1] ~= ARGV[1] then return {{'other', ''}} end
if known[2] then return {{'done', known[2]}} end
if known[3] == ARGV[2] then return {{'new', ''}} end
return {{'running', ''}}
"""
_OWNED = "if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end\n"
_RENEW = _OWNED + f"return redis.call('EXPIRE', KEYS[1], {CLAIM_SECONDS})"
_FINISH = (
    _OWNED
    + f"""
redis.call('HSET', KEYS[1], 'answer', ARGV[2])
return redis.call('EXPIRE', KEYS[1], {KEEP_SECONDS})
"""
)
_ABANDON = _OWNED + "return redis.call('DEL', KEYS[1])"


class RedisRecords:
    """Records in Redis, as temper:answer:{key}. Scripts may be repeated when their answer got lost."""

    def __init__(self, settings: CommonSettings) -> None:
        self._redis = connect_async(settings)
        self._claim, self._renew, self._finish, self._abandon = map(
            self._redis.register_script, (_CLAIM, _RENEW, _FINISH, _ABANDON)
        )

    async def claim(self, key: str, sha: str, token: str) -> tuple[str, str]:
        state, answer = await self._run(self._claim, key, sha, token)
        return state, answer

    async def renew(self, key: str, token: str) -> None:
        await self._run(self._renew, key, token)

    async def finish(self, key: str, token: str, answer: str) -> None:
        await self._run(self._finish, key, token, answer)

    async def abandon(self, key: str, token: str) -> None:
        await self._run(self._abandon, key, token)

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: Any, key: str, *args: str) -> Any:
        return await call_async(lambda: script(keys=[f"temper:answer:{key}"], args=list(args)))


class Idempotency:
    """Answers requests that carry a key."""

    def __init__(self, records: Records) -> None:
        self.records = records

    async def answer(self, request: Request, key: str, said: bytes, work: Work) -> Response:
        """Answers with the kept answer, or with that of ``work``, which is then kept.

        Args:
            said: what the request says; another text under the same key is another request.

        Raises:
            Conflict: the key was used for another request.
            InProgress: the same request is being answered.
            Unavailable: Redis is away, so nobody can say whether this was sent before.
        """
        route = f"{request.method} {request.url.path}"
        sha = hashlib.sha256(route.encode() + b"\0" + said).hexdigest()
        # A digest of both keeps the keys of different principals apart, whatever characters are in them.
        owner = principal_of(request).id
        name = hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()
        token = secrets.token_hex(8)
        state, kept = await self.records.claim(name, sha, token)
        if state == "other":
            raise Conflict(
                f"the idempotency key {key!r} was used for another request in the last {KEEP_SECONDS // 3600} hours: "
                "use a new key",
                param="idempotency-key",
            )
        if state == "running":
            raise InProgress(
                f"the request with the idempotency key {key!r} is being answered: try again shortly",
                param="idempotency-key",
            )
        if state == "done":
            answer = Answer.unpack(kept)
            return Response(answer.body, answer.status, {**answer.headers, "idempotency-replayed": "true"})
        return await self._first(name, token, work)

    async def _first(self, name: str, token: str, work: Work) -> Response:
        renewing = asyncio.ensure_future(self._renew(name, token))
        response: Response | None = None
        try:
            response = await work()
        finally:
            await cancel_and_wait(renewing)
            if response is None or not 200 <= response.status_code < 300:
                await _tried(self.records.abandon(name, token))
        if 200 <= response.status_code < 300:
            headers = {header: response.headers[header] for header in _KEPT_HEADERS if header in response.headers}
            answer = Answer(response.status_code, headers, bytes(response.body))
            await _tried(self.records.finish(name, token, answer.pack()))
        return response

    async def _renew(self, name: str, token: str) -> None:
        while True:
            await asyncio.sleep(CLAIM_SECONDS / 3)
            await _tried(self.records.renew(name, token))


async def _tried(record: Awaitable[None]) -> None:
    """Writes a record, or logs that Redis is away. The work is done and its client gets the answer in any case; without
    the record, the key is free when its claim ends."""
    try:
        await record
    except Unavailable as error:
        log.warning("an idempotency key could not be recorded", reason=error.message)


class OncePerKey:
    """Answers one request: the work is done once for its Idempotency-Key, if it has one.

    Args:
        key: the header; None: every request does its work.
    """

    def __init__(self, request: Request, key: str | None) -> None:
        self._request = request
        self.key = key

    async def __call__(self, work: Callable[[], Awaitable[Any]], **bodies: BaseModel | None) -> Any:
        """Result of ``work``, or the answer that is kept of it.

        Args:
            bodies: the request's bodies by the names of the handler's arguments. The key stands for them, and for the
                path.
        """
        return await work() if self.key is None else await self.keep(_said(bodies), work)

    def digest(self, said: bytes) -> str:
        """Digest of caller, key and content: what is done under it is done once, by whichever gateway."""
        owner = principal_of(self._request).id
        return hashlib.sha256(f"{owner}\0{self.key}\0".encode() + said).hexdigest()

    async def keep(self, said: bytes, work: Callable[[], Awaitable[Any]]) -> Response:
        """Answer of ``work`` for a request that has a key and the content ``said``."""
        if self.key is None:
            raise ValueError("the request has no key")

        async def answer() -> Response:
            result = await work()
            status = int(self._request.scope["route"].status_code or 200)
            return result if isinstance(result, Response) else json_answer(result, status)

        keeper = resource_of(self._request, Idempotency)
        return await keeper.answer(self._request, self.key, said, answer)


async def _once_per_key(request: Request, idempotency_key: IdempotencyKey = None) -> OncePerKey:
    return OncePerKey(request, idempotency_key)


Once = Annotated[OncePerKey, Depends(_once_per_key)]
"""Argument of a handler whose route's permission is ``idempotent``."""


def json_answer(body: Any, status: int) -> Response:
    """An answer in one piece."""
    return Response(to_json(body), status, media_type="application/json")


def _said(bodies: Mapping[str, BaseModel | None]) -> bytes:
    given = {name: body.model_dump(mode="json") for name, body in bodies.items() if body is not None}
    return json.dumps(given, sort_keys=True).encode()
