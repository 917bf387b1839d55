"""Reader of the records of a queue on Redis, for asyncio; each kind of work has a subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

from redis.commands.core import AsyncScript

from services.common.errors import NewerSchema, NotFound
from services.common.queue.depth import QueueDepth, measure
from services.common.queue.keyspace import Keyspace
from services.common.settings import CommonSettings
from services.common.storage.record_versions import PassOver
from services.common.storage.redis import call_async, connect_async

_PAGE = 100
_SWEPT = 4
"""Oldest ids that a submission looks at."""

Record = TypeVar("Record")


class QueueReader(ABC, Generic[Record]):
    """Reader of the records of one queue. For one asyncio loop; every method may raise Unavailable."""

    fields: ClassVar[Sequence[str]]
    """Fields of the hash that a record is made of."""
    called: ClassVar[str]
    """Noun for a record in messages."""

    def __init__(self, settings: CommonSettings, keyspace: Keyspace) -> None:
        self._redis = connect_async(settings)
        self._keys = keyspace

    @abstractmethod
    def record(self, values: Any) -> Record | None:
        """A record of the values of ``fields``; None if the hash is gone."""

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> None:
        """Raises Unavailable if Redis does not answer."""
        await call_async(self._redis.ping)

    async def depth(self) -> QueueDepth:
        """Waiting and running records of all owners."""
        return await measure(self._redis, self._keys)

    async def get(self, job_id: str) -> Record:
        """Raises NotFound."""
        found = await self._find(job_id)
        if found is None:
            raise self.missing(job_id)
        return found

    def missing(self, job_id: str) -> NotFound:
        """The error for an id that nothing has."""
        return NotFound(f"no such {self.called}: {job_id[:80]!r}", param="id")

    def _script(self, script: str) -> AsyncScript:
        return self._redis.register_script(self._keys.lua(script))

    async def _page(
        self,
        index: str,
        limit: int,
        after: str | None,
        wanted: Callable[[Record], bool],
        *,
        oldest_first: bool = False,
        pass_over: PassOver | None = None,
    ) -> list[Record]:
        """Records of an index, newest first unless it is said otherwise, from behind ``after`` on.

        Args:
            pass_over: told of those that a later release wrote. None: they are an error.

        Raises:
            NotFound: there is no ``after``.
            NewerSchema: there is a record of a later release.
        """
        start = 0
        if after is not None:
            rank_of = self._redis.zrank if oldest_first else self._redis.zrevrank
            rank = await call_async(lambda: cast(Awaitable[int | None], rank_of(index, after)))
            if rank is None:
                raise self.missing(after)
            start = rank + 1
        found: list[Record] = []
        while len(found) < limit:
            ids = await self._ids(index, start, newest_first=not oldest_first)
            if not ids:
                break
            start += len(ids)
            for job_id, values in zip(ids, await self._values(ids), strict=True):
                try:
                    record = self.record(values)
                except NewerSchema as error:
                    if pass_over is None:
                        raise
                    if len(found) < limit:
                        pass_over(job_id, dict(zip(self.fields, values, strict=True)).get("key_id"), error)
                    continue
                if record is None:  # expired since
                    await self._forget(index, job_id)
                    start -= 1
                elif wanted(record):
                    found.append(record)
        return found[:limit]

    async def _ids(self, index: str, start: int, *, newest_first: bool) -> list[str]:
        reply: Any = await call_async(lambda: self._redis.zrange(index, start, start + _PAGE - 1, desc=newest_first))
        return [str(job_id) for job_id in reply]

    async def _forget(self, index: str, job_id: str) -> None:
        await call_async(lambda: self._redis.zrem(index, job_id))

    async def _forget_expired(self, index: str) -> None:
        """Takes what has expired from the old end of an index: lists look at the newest ones alone."""
        ids: Any = await call_async(lambda: self._redis.zrange(index, 0, _SWEPT - 1))
        for job_id, record in zip(ids, await self._exist(ids), strict=True):
            if not record:
                await self._forget(index, job_id)

    async def _exist(self, job_ids: Sequence[str]) -> Sequence[int]:
        async def read() -> Any:
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.exists(self._keys.job_key(job_id))
                return await pipe.execute()

        return cast(Sequence[int], await call_async(read))

    async def _find(self, job_id: str) -> Record | None:
        return self.record((await self._values([job_id]))[0])

    async def _values(self, job_ids: Sequence[str]) -> Sequence[Sequence[str | None]]:
        """Values of ``fields`` of each hash."""

        async def read() -> Any:
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hmget(self._keys.job_key(job_id), list(self.fields))
                return await pipe.execute()

        return cast(Sequence[Sequence[str | None]], await call_async(read))
