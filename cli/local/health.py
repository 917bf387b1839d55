"""Health checks of the services that `temper up` starts. Each returns None when ready, else the reason."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.local.private_tls import PrivateTls
from cli.local.supervisor import HealthCheck

_TIMEOUT = 1.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy of the environment stands between this machine and itself."""


def http_ready(url: str, timeout: float = _TIMEOUT) -> HealthCheck:
    """GET answers 200 within ``timeout`` seconds."""

    def check() -> str | None:
        try:
            with _DIRECT.open(url, timeout=timeout) as response:
                return None if response.status == 200 else f"{url} answers {response.status}"
        except urllib.error.HTTPError as error:
            return f"{url} answers {error.code}: {error.read(300).decode('utf-8', 'replace').strip()}"
        except OSError as error:
            return f"{url}: {error}"

    return check


def grpc_ready(address: str, service: str, tls: PrivateTls, timeout: float = _TIMEOUT) -> HealthCheck:
    """The standard gRPC health service says SERVING for ``service`` within ``timeout`` seconds."""
    credentials = tls.channel_credentials()

    def check() -> str | None:
        with grpc.secure_channel(address, credentials, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
            except grpc.RpcError as error:
                status: Any = error  # the subclass that carries the status is private to grpcio
                return f"{address}: {status.code().name.lower()}"
        return None if answer.status == health_pb2.HealthCheckResponse.SERVING else f"{service} is not serving yet"

    return check
