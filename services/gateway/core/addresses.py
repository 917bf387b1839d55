"""Addresses: where the gateway listens, and where its engines are.

The module imports little, so that a probe every few seconds starts quickly."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from services.common.settings import FileSettings


class ListenSettings(FileSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    host: str = "127.0.0.1"
    port: int = Field(8420, ge=0, le=65535)
    """On Kubernetes a service called "temper" sets TEMPER_PORT to a URL, so the pod needs enableServiceLinks: false."""


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
