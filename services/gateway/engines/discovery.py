"""Discovery of engines: addresses that are given, and those that a name stands for, asked for again and again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

import structlog

from services.common.storage.repeated import repeat
from services.gateway.core.addresses import EngineTarget, join

log = structlog.get_logger(__name__)

Resolve = Callable[[str, int], Awaitable[Collection[str]]]
"""The addresses ("host:port") that a name stands for. Raises OSError when there is no answer."""


async def resolve(host: str, port: int) -> frozenset[str]:
    """All A and AAAA records, by the system's resolver."""
    # Without a timeout of our own: the thread would go on, and one more would be started each time.
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(join(str(sockaddr[0]), port) for *_, sockaddr in found)


class Discovery:
    """Keeps the list of engines current.

    Args:
        targets: what the settings say.
        every: seconds between two questions.
        on_change: told all addresses whenever they are others than before.
        ask: the resolver.
    """

    def __init__(
        self,
        targets: Iterable[EngineTarget],
        every: float,
        on_change: Callable[[frozenset[str]], None],
        ask: Resolve = resolve,
    ) -> None:
        targets = tuple(targets)
        self._names = tuple(target for target in targets if target.dns)
        self._every = every
        self._on_change = on_change
        self._ask = ask
        self._known: dict[EngineTarget, frozenset[str]] = {}
        self._silent: set[EngineTarget] = set()
        self.given = frozenset(target.address for target in targets if not target.dns)
        """Addresses that need no resolver."""
        self._told = self.given

    @property
    def known(self) -> Mapping[EngineTarget, frozenset[str]]:
        """Addresses that each name stood for when it was last answered."""
        return self._known

    async def run(self) -> None:
        """Asks until it is cancelled; returns at once if there are no names."""
        if not self._names:
            return
        # Each for itself: a name whose servers hang does not keep the others waiting.
        async with asyncio.TaskGroup() as tasks:
            for name in self._names:
                tasks.create_task(self._follow(name))

    async def _follow(self, name: EngineTarget) -> None:
        await repeat(lambda: self._look_up(name), self._every, log, "discovery")

    async def _look_up(self, name: EngineTarget) -> None:
        try:
            found = frozenset(await self._ask(name.host, name.port))
            if not found:
                raise OSError("the answer has no addresses")
        except (OSError, UnicodeError) as error:
            # Engines do not end because nobody can say where they are: those that do are lost by their connection.
            if name not in self._silent:
                self._silent.add(name)
                kept = len(self._known.get(name, ()))
                log.warning("engines cannot be looked up", name=name.address, error=str(error), kept=kept)
            return
        if name in self._silent:
            self._silent.discard(name)
            log.info("engines can be looked up again", name=name.address, found=len(found))
        self._known[name] = found
        addresses = self.given.union(*self._known.values())
        if addresses != self._told:
            self._told = addresses
            self._on_change(addresses)
