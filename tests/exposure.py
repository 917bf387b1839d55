"""What somebody without credentials reads on a port, by HTTP, by HTTPS and by gRPC."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import grpc

SECONDS = 2.0
"""For which a port is waited for."""
PATHS = (
    "/",
    "/status",
    "/healthz",
    "/metrics",
    "/debug/pprof/",
    "/ui/index.html",
    "/buckets/?pretty=y",
    "/buckets/temper/",
    "/dir/status",
    "/dir/assign",
    "/dir/lookup?volumeId=1",
    "/vol/status",
    "/cluster/status",
    "/stats/counter",
    "/login",
)
"""Of SeaweedFS' master, volume server, filer, S3 and admin pages."""
CALLS = (
    "/temper.v1.Engine/GetStatus",
    "/temper.v1.Engine/GetTokenizerFiles",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/filer_pb.SeaweedFiler/ListEntries",
    "/filer_pb.SeaweedFiler/GetFilerConfiguration",
    "/master_pb.Seaweed/Statistics",
    "/volume_server_pb.VolumeServer/VolumeServerStatus",
    "/messaging_pb.SeaweedMessaging/FindBrokerLeader",
    "/worker_pb.WorkerService/WorkerStream",
    "/s3_pb.SeaweedS3/Configure",
)


def asked(host: str, port: int, path: str, *, tls: bool) -> bytes | None:
    """Body of the answer to a GET without credentials; empty: it is a refusal. None: nobody speaks HTTP there."""
    try:
        with socket.create_connection((host, port), timeout=SECONDS) as plain:
            connection: socket.socket = plain
            if tls:
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                connection = context.wrap_socket(plain)
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while part := connection.recv(65536):
                answer += part
    except OSError:
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    version, _, status = head.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        return None
    return body if status.startswith((b"2", b"3")) else b""


def called(host: str, port: int) -> Iterator[str]:
    """gRPC methods that answer somebody without a certificate, in plaintext or by TLS."""
    target = f"{host}:{port}"
    channels = [grpc.insecure_channel(target)]
    with contextlib.suppress(OSError):  # it speaks no TLS
        authority = ssl.get_server_certificate((host, port), timeout=SECONDS).encode()
        channels.append(grpc.secure_channel(target, grpc.ssl_channel_credentials(authority)))
    for channel in channels:
        with channel:
            for method in CALLS:
                call: Any = channel.unary_unary(method)
                try:
                    call(b"", timeout=SECONDS)
                    yield method
                except grpc.RpcError as error:
                    status: Any = error  # the subclass that carries the status is private to grpcio
                    if status.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        break  # nobody speaks gRPC with a stranger there, whatever the method
                    yield f"{method}: {status.code().name}"


def readable(port: int, host: str = "127.0.0.1") -> list[str]:
    """What a stranger gets on a port."""
    found: list[str] = []
    for tls in (False, True):
        for path in PATHS:
            body = asked(host, port, path, tls=tls)
            if body is None:
                break
            if body:
                found.append(f"GET {path}: {body[:100]!r}")
    return [*found, *called(host, port)]
