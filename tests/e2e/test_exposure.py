"""What another user of the machine finds in a running `temper up`, on its ports and in its files: the API alone."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.stack import Stack

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
)


def listening(stack: Stack) -> dict[int, str]:
    """Ports on which processes of a stack listen, with the service's name."""
    found: dict[int, str] = {}
    for service, pid in stack.state["pids"].items():
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            for connection in each.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip.removeprefix("::ffff:") == "127.0.0.1", (
                        f"{service} listens on {connection.laddr}"
                    )
                    found[connection.laddr.port] = service
    return found


def asked(port: int, path: str, *, tls: bool) -> bytes | None:
    """Body of the answer to a GET without credentials; empty: it is a refusal. None: nobody speaks HTTP there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as plain:
            connection: socket.socket = plain
            if tls:
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                connection = context.wrap_socket(plain)
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
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


def called(port: int) -> Iterator[str]:
    """gRPC methods that answer somebody without a certificate, in plaintext or by TLS."""
    target = f"127.0.0.1:{port}"
    channels = [grpc.insecure_channel(target)]
    with contextlib.suppress(OSError):  # it speaks no TLS
        authority = ssl.get_server_certificate(("127.0.0.1", port), timeout=SECONDS).encode()
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


def readable(port: int) -> list[str]:
    """What a stranger gets on a port."""
    found: list[str] = []
    for tls in (False, True):
        for path in PATHS:
            body = asked(port, path, tls=tls)
            if body is None:
                break
            if body:
                found.append(f"GET {path}: {body[:100]!r}")
    return [*found, *called(port)]


def test_no_port_but_the_apis_answers_a_stranger(stack: Stack) -> None:
    ports = listening(stack)
    assert {"gateway", "engine", "s3", "valkey"} == set(ports.values())
    metrics = int(stack.env["TEMPER_METRICS_PORT"])  # which this stack was asked to open
    api = {stack.port, metrics}
    assert api < set(ports)
    with ThreadPoolExecutor(len(ports)) as pool:
        found = dict(zip(ports, pool.map(readable, ports), strict=True))
    assert all(found[port] for port in api), "this is how something readable is seen"
    assert {(ports[port], *what) for port, what in found.items() if what and port not in api} == set()


def test_the_servers_of_keys_and_objects_ask_for_credentials(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", stack.state["ports"]["redis"]), timeout=5) as valkey:
        for command in (b"KEYS *\r\n", b"GET a\r\n", b"CONFIG GET *\r\n", b'EVAL "return 1" 0\r\n'):
            valkey.sendall(command)
            assert valkey.recv(4096).startswith(b"-NOAUTH"), command


@pytest.mark.parametrize("place", ["files", "sockets"])
def test_files_are_their_users(stack: Stack, place: str) -> None:
    if place == "files":
        found = [stack.data_dir, *stack.data_dir.iterdir()]
    else:
        found = [Path(line) for line in (stack.data_dir / "s3" / "sockets.txt").read_text().splitlines()]
        found = [path for path in found if path.exists()]
    assert found
    for path in found:
        mode = path.stat().st_mode
        assert path.stat().st_uid == os.getuid()
        assert not mode & (stat.S_IRWXG | stat.S_IRWXO), f"{path} is {stat.filemode(mode)}"
