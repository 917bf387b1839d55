"""TCP ports of this machine: which are free, and how to keep one until its server listens."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import weakref
from collections.abc import Collection

from services.common.errors import Unavailable

LOOPBACK = "127.0.0.1"
_SERVER_PORTS = range(20000, 32000)


class ClaimedPort:
    """A port of the loopback interface that nobody else on this machine is given while this object is there.

    A socket is bound to it that never listens. A server can listen there all the same (Linux: if both allow that the
    address is used again), but whoever looks for a free port does not get it, as it would while the server that it was
    chosen for is still starting. Elsewhere than on Linux nothing holds it.
    """

    def __init__(self, number: int, *, again: bool = False) -> None:
        """Claims a port.

        Args:
            again: it is the server's from an earlier start, whose last connections may linger (TIME_WAIT).

        Raises:
            OSError: it is not free.
        """
        self.number = number
        holder = socket.socket()
        self._release = weakref.finalize(self, holder.close)
        if again:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, number))
        # Not before, for a new one: two sockets that both allow it could claim the same port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "linux":
            self.release()

    def release(self) -> None:
        """Somebody else may be given it from now on."""
        self._release()


def claim_ports(count: int, *, avoid: Collection[int] = ()) -> list[ClaimedPort]:
    """Distinct ports outside ``avoid`` that were free.

    They lie below the ephemeral range (Linux: 32768 and up), so that no outgoing connection takes one between choice
    and use, or while a server that died is being started again.

    Raises:
        Unavailable: there are not as many.
    """
    claims: list[ClaimedPort] = []
    for number in random.sample(_SERVER_PORTS, k=len(_SERVER_PORTS)):
        if len(claims) == count:
            break
        if number in avoid:
            continue
        with contextlib.suppress(OSError):
            claims.append(ClaimedPort(number))
    if len(claims) < count:
        raise Unavailable(f"no {count} free ports on {LOOPBACK} between {_SERVER_PORTS[0]} and {_SERVER_PORTS[-1]}")
    return claims


def free_ports(count: int, *, avoid: Collection[int] = ()) -> list[int]:
    """Same as claim_ports(), for use at once: nobody keeps them."""
    claims = claim_ports(count, avoid=avoid)
    for claim in claims:
        claim.release()
    return [claim.number for claim in claims]


def port_is_free(host: str, port: int) -> bool:
    """True if a server could listen there now (as a server would: TIME_WAIT does not count)."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError:
                return False
    return True
