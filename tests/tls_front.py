"""TLS in front of a server that has none: it ends the encryption and passes on the bytes."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from types import TracebackType
from typing import Self

from services.common.security.tls import TlsFiles


class TlsFront:
    """Listens on a free port of 127.0.0.1 while it is entered.

    Args:
        files: its certificate.
        behind: host:port of the server.
    """

    def __init__(self, files: TlsFiles, behind: str) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(files.cert, files.key)
        host, _, port = behind.rpartition(":")
        self._behind = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.handshakes = 0
        """That came to an end: somebody trusted the certificate."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def _pass_on(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True) as client:
            self.handshakes += 1
            with socket.create_connection(self._behind) as server:
                ends: dict[socket.socket, socket.socket] = {client: server, server: client}
                while True:
                    # What TLS has decrypted already no select sees.
                    ready = [client] if client.pending() else select.select(list(ends), [], [], 10)[0]
                    for end in ready:
                        data = end.recv(65536)
                        if not data:
                            return
                        ends[end].sendall(data)
