"""Connecting to engines anew when this gateway's certificate has been renewed, without a failed request.

A connection keeps the certificate that it was made with. So each engine gets a second connection; when that one is
ready new requests take it, and the first is closed once its requests have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping

import structlog

from services.common.security.tls import FOLLOW_SECONDS, Certificates
from services.common.storage.repeated import repeat
from services.gateway.engines.client import EngineClient

log = structlog.get_logger(__name__)

_READY_SECONDS = 30.0
_LOOK_SECONDS = 0.1
Connections = MutableMapping[str, asyncio.Task[None]]


class CertificateRotation:
    """Replacement of the connections of one pool when its certificate files change.

    Args:
        certificates: looked at every few seconds.
        clients: the pool's, by address; changed here.
        connections: their tasks; changed here.
        new_client: makes one for an address.
    """

    def __init__(
        self,
        certificates: Certificates,
        clients: MutableMapping[str, EngineClient],
        connections: Connections,
        new_client: Callable[[str], EngineClient],
    ) -> None:
        self._certificates = certificates
        self._clients = clients
        self._connections = connections
        self._new_client = new_client
        self._retired: dict[EngineClient, asyncio.Task[None]] = {}

    @property
    def retired(self) -> tuple[EngineClient, ...]:
        """Connections that still finish what they began."""
        return tuple(self._retired)

    async def run(self) -> None:
        """Follows until cancelled."""
        try:
            await repeat(self._follow, FOLLOW_SECONDS, log, "certificates")
        finally:
            for task in self._retired.values():
                task.cancel()
            await asyncio.gather(*self._retired.values(), return_exceptions=True)

    async def _follow(self) -> None:
        if await asyncio.to_thread(self._certificates.refresh):
            await asyncio.gather(*(self._replace(client) for client in tuple(self._clients.values())))
        await self._reap()

    async def _replace(self, old: EngineClient) -> None:
        if not old.connected:
            return  # it takes the new certificate when it connects
        fresh = self._new_client(old.address)
        connection = asyncio.create_task(fresh.run(), name=f"engine {old.address}")
        try:
            async with asyncio.timeout(_READY_SECONDS):
                while not fresh.ready and old.connected:  # noqa: ASYNC110 - two connections change it
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            log.warning(
                "no connection with the new certificate, the old one stays", engine=old.address, error=fresh.last_error
            )
        if fresh.ready and self._clients.get(old.address) is old:
            self._retired[old] = self._connections[old.address]
            self._clients[old.address], self._connections[old.address] = fresh, connection
            log.info("connected with the new certificate", engine=old.address, finishing=old.in_flight)
            return
        connection.cancel()
        await asyncio.wait([connection])

    async def _reap(self) -> None:
        for client, connection in list(self._retired.items()):
            if connection.done():
                del self._retired[client]
            elif client.in_flight == 0 and not connection.cancelling():
                connection.cancel()  # ends when its other calls have
