"""Port of an engine's gRPC server."""

from __future__ import annotations

from grpc import aio

from services.common.errors import Unavailable
from services.common.security.tls import Certificates


def bind(server: aio.Server, host: str, port: int, certificates: Certificates | None = None) -> int:
    """Listens, with TLS if there are ``certificates``; returns the port.

    Raises:
        Unavailable: the port is taken, or the address is not this machine's.
    """
    try:
        if certificates is None:
            bound = server.add_insecure_port(f"{host}:{port}")
        else:
            bound = server.add_secure_port(f"{host}:{port}", certificates.server_credentials())
    except RuntimeError as error:
        raise Unavailable(
            f"cannot listen on {host}:{port}: the port is in use or the address is not this machine's; "
            "set TEMPER_GRPC_HOST and TEMPER_GRPC_PORT"
        ) from error
    return int(bound)
