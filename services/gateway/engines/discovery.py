"""Which engines there are: addresses that are given, and those that a name stands for, asked for again and again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

_SCHEME = "dns:///"


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """One entry of the setting `engines`.

    Args:
        host: name or address; an IPv6 address without brackets.
        port: of the engines' gRPC.
        dns: each address of the name is an engine.
    """

    host: str
    port: int
    dns: bool = False

    @classmethod
    def parse(cls, text: str) -> EngineTarget:
        """Reads "host:port", "[address]:port" or "dns:///name:port".

        Raises:
            ValueError: it is none of them.
        """
        dns = text.startswith(_SCHEME)
        host, colon, port = text.removeprefix(_SCHEME).rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        sound = bool(host) and "/" not in host and (":" not in host or bracketed) and not any(map(str.isspace, host))
        if not (colon and sound and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(
                f"{text[:200]!r} is not an engine: write host:port, or dns:///name:port for all addresses of a name"
            )
        return cls(host, int(port), dns)

    @property
    def address(self) -> str:
        """host:port."""
        return join(self.host, self.port)


def join(host: str, port: int) -> str:
    """host:port; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
        """What each name stood for when it was last answered."""
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
        while True:
            await self._look_up(name)
            await asyncio.sleep(self._every)

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
