"""Ports that `temper up` needs."""

from __future__ import annotations

import contextlib

import httpx
import psutil

from cli.doctor.findings import Finding, failure, ok
from cli.doctor.place import Place
from cli.local.ports import port_is_free

_SECONDS = 2.0


def gateway(place: Place) -> Finding:
    """The gateway's port is free, or Temper listens there."""
    if port_is_free(place.host, place.port):
        return ok(f"port {place.port} on {place.host} is free")
    if _is_temper(place.port):
        return ok(f"Temper listens on port {place.port}")
    owner = _owner(place.port)
    return failure(
        f"port {place.port} on {place.host} is in use{f' by {owner}' if owner else ' or cannot be bound'}",
        "stop what listens there, or choose another with --port or TEMPER_PORT",
    )


def _is_temper(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError, ValueError):
        answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=_SECONDS, trust_env=False)
        health = answer.json()
        return isinstance(health, dict) and "object_store" in health
    return False


def _owner(port: int) -> str:
    """Process that listens there; empty: it is another user's."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""
