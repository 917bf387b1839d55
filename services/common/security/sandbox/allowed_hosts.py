"""Hosts that commands in the sandbox may reach: through a proxy outside of it, which dials nobody else."""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

_HEAD_BYTES = 16384
_BLOCK = 65536
_SECONDS = 30.0
_USUAL_PORTS = (80, 443)
MOST_CONNECTIONS = 64
"""At a time: each is a thread of this process, whose limits are not those of the command."""
_CARRY_IPV4 = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "2002::/16")))
"""Networks of IPv6 behind which any address of IPv4 may be."""


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Hosts by name and port. Raises ValueError: a name is none.

    A name that resolves to an address of a private network is refused, unless it is "localhost" or an address itself.
    """

    names: frozenset[tuple[str, int]] = frozenset()
    """In small letters."""

    @classmethod
    def parse(cls, texts: Sequence[str]) -> AllowedHosts:
        """From "host", which means ports 80 and 443, and "host:port"."""
        found = set()
        for text in texts:
            try:
                parts = urlsplit(f"//{text}")
                name, port = parts.hostname, parts.port
            except ValueError as error:
                raise ValueError(f"{text!r} is not a host or host:port: {error}") from error
            if not name or parts.path or parts.username is not None or "*" in name or not _can_be_looked_up(name):
                raise ValueError(f"{text!r} is not a host or host:port")
            found |= {(name, one) for one in (_USUAL_PORTS if port is None else (port,))}
        return cls(frozenset(found))

    def __bool__(self) -> bool:
        return bool(self.names)

    def dial(self, name: str, port: int) -> socket.socket:
        """A connection to a host that is allowed. Raises OSError: it is not, or is not there."""
        name = name.lower()
        if (name, port) not in self.names:
            raise PermissionError(f"{name}:{port} is not allowed")
        for _, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
            found = ipaddress.ip_address(str(address[0]).partition("%")[0])
            if _is_public(found) or name == "localhost" or name == str(found):
                with contextlib.suppress(OSError):  # the next address may be in a network that can be reached
                    return socket.create_connection((str(address[0]), port), timeout=_SECONDS)
        raise PermissionError(f"{name}:{port} is not there, or in a private network")

    @contextlib.contextmanager
    def served_on(self, listener: socket.socket) -> Iterator[None]:
        """An HTTP proxy on a listening socket, which is closed in the end."""
        open_now: set[socket.socket] = set()
        free = threading.Semaphore(MOST_CONNECTIONS)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    free.acquire()
                    client, _ = listener.accept()
                    open_now.add(client)
                    threading.Thread(target=serve, args=(client,), daemon=True).start()

        def serve(client: socket.socket) -> None:
            try:
                with client, contextlib.suppress(OSError):
                    self._serve(client)
            finally:
                open_now.discard(client)
                free.release()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            for client in tuple(open_now):
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(_SECONDS)
        head = b""
        while b"\r\n\r\n" not in head:
            part = client.recv(_BLOCK)
            head += part
            if not part or len(head) > _HEAD_BYTES:
                return
        line, _, rest = head.partition(b"\r\n")
        try:
            method, target, version = line.decode("ascii").split(" ")
            parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            return
        try:
            server = self.dial(name, port)
        except OSError as error:
            reason = f"temper: {error}".encode()
            client.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\n\r\n%s" % (len(reason), reason))
            return
        with server:
            if method == "CONNECT":
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                server.sendall(rest.partition(b"\r\n\r\n")[2])
            else:
                path = parts._replace(scheme="", netloc="").geturl() or "/"
                server.sendall(f"{method} {path} {version}\r\n".encode() + rest)
            _join(client, server)


def _can_be_looked_up(name: str) -> bool:
    """Whether DNS has such names at all."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not any(address in network for network in _CARRY_IPV4)


def _join(one: socket.socket, other: socket.socket) -> None:
    """Carries bytes both ways until one side ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        while ready := selector.select(_SECONDS):
            for key, _ in ready:
                source = key.fileobj
                assert isinstance(source, socket.socket)  # noqa: S101 — both are
                block = source.recv(_BLOCK)
                if not block:
                    return
                key.data.sendall(block)
