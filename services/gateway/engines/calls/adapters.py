"""Calls about adapters: engines read the pointers anew, and one checks the files of a new version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import grpc
import structlog
from grpc import aio

from services.common.errors import AdapterRejected, Unavailable
from services.common.pb import adapters_pb2, engine_pb2
from services.gateway.core.errors import engine_error
from services.gateway.engines.client import EngineClient
from services.gateway.engines.pool import EnginePool
from services.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

_CHUNK = 2**20
_REJECTED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


class AdapterCalls:
    """Calls about adapters, to the engines that are connected.

    Args:
        engines: who is asked.
        settings: how long an answer may take.
    """

    def __init__(self, engines: EnginePool, settings: GatewaySettings) -> None:
        self._engines = engines
        self._settings = settings

    async def sync(self) -> list[adapters_pb2.SyncResponse]:
        """Makes every engine read the adapter pointers, within a bounded time. Failures are logged: an engine that was
        not reached reads them at its next poll."""
        connected = [client for client in self._engines.clients if client.connected]
        results = await asyncio.gather(*map(self._sync, connected), return_exceptions=True)
        answers: list[adapters_pb2.SyncResponse] = []
        for client, result in zip(connected, results, strict=True):
            if isinstance(result, adapters_pb2.SyncResponse):
                answers.append(result)
            else:
                log.warning("engine did not sync its adapters", engine=client.address, error=str(result))
        return answers

    async def validate(self, files: Mapping[str, bytes]) -> adapters_pb2.ValidateResponse:
        """Has one engine bind an adapter's files strictly, without loading them.

        Raises:
            AdapterRejected: they do not bind; the message names the tensor or field.
            Unavailable: no engine can be asked.
        """
        for client in self._engines.clients:
            if client.connected:
                return await self._validate(client, files)
        raise Unavailable("no engine is there to check the adapter", retry_after=2.0)

    async def _sync(self, client: EngineClient) -> adapters_pb2.SyncResponse:
        try:
            return await client.adapters_stub().Sync(
                adapters_pb2.SyncRequest(), timeout=self._settings.sync_timeout_seconds
            )
        except aio.AioRpcError as error:
            raise client.unavailable(error) from error

    async def _validate(self, client: EngineClient, files: Mapping[str, bytes]) -> adapters_pb2.ValidateResponse:
        try:
            answer = await client.adapters_stub().Validate(
                _chunks(files), timeout=self._settings.validate_timeout_seconds
            )
        except aio.AioRpcError as error:
            if error.code() in _REJECTED:
                raise AdapterRejected(error.details() or "the engine rejects the adapter") from error
            raise client.unavailable(error) from error
        if answer.HasField("error"):
            raise engine_error(answer.error)
        return answer


async def _chunks(files: Mapping[str, bytes]) -> AsyncIterator[engine_pb2.FileChunk]:
    for name, data in files.items():
        # An empty file has a chunk, too: the engine is to see that it is there.
        for start in range(0, max(1, len(data)), _CHUNK):
            yield engine_pb2.FileChunk(name=name, data=data[start : start + _CHUNK])
