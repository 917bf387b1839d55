"""Hosts that commands may reach: a real command, a real proxy, real servers on this machine."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.common.security.sandbox.allowed_hosts import MOST_CONNECTIONS, AllowedHosts
from services.common.security.sandbox.commands import CommandLimits, CommandSandbox
from services.common.security.sandbox.shut_in import Isolation, SandboxUnavailable
from tests.missing import sandbox_level

ASKS = """
import socket, sys, urllib.request
allowed, other = sys.argv[1:]
def ask(url):
    try:
        return urllib.request.urlopen(url, timeout=20).read().decode()
    except OSError as error:
        return str(error)
print(ask(f"http://localhost:{allowed}/a?b"))
print(ask(f"http://localhost:{other}/a"))
for family in (socket.AF_UNIX, socket.AF_NETLINK, socket.AF_VSOCK):
    try:
        socket.socket(family)
        print("a socket")
    except OSError as error:
        print(error.strerror)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    try:
        one = socket.socket(socket.AF_INET, kind)
        one.settimeout(5)
        one.connect(("127.0.0.1", int(other)))
        one.send(b"x")
        print("sent")
    except OSError as error:
        print(error.strerror)
tunnel = socket.create_connection(("127.0.0.1", 3128))
tunnel.sendall(f"CONNECT localhost:{allowed} HTTP/1.1\\r\\n\\r\\n".encode())
print(tunnel.recv(100).split(b"\\r")[0])
tunnel.sendall(b"GET /tunnel HTTP/1.0\\r\\n\\r\\n")
print(tunnel.makefile("rb").read().split(b"\\r\\n")[-1])
"""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"you asked for {self.path}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[int]:
    """Port of a server on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running.server_port
        running.shutdown()
        thread.join()


def test_a_command_reaches_the_hosts_that_are_allowed_and_no_others(tmp_path: Path, server: int) -> None:
    hosts = AllowedHosts.parse([f"localhost:{server}"])
    sandbox = CommandSandbox(Isolation.NAMESPACES, tmp_path.resolve(), (), hosts)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as other,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(other.getsockname())
        arguments = [sandbox.python, "-I", "-S", "-c", ASKS, str(server), str(other.getsockname()[1])]
        with sandbox_level():
            outcome = sandbox.run(arguments, CommandLimits())
        for listening in (other, udp):
            listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)
    lines = outcome.output.splitlines()
    assert lines[:2] == ["you asked for /a?b", "HTTP Error 403: Forbidden"], outcome
    assert lines[2:5] == ["Operation not permitted"] * 3
    assert lines[5] == "Connection refused"
    assert lines[7:] == ["b'HTTP/1.1 200 Connection established'", "b'you asked for /tunnel'"]


def test_hosts_are_names_and_ports() -> None:
    assert AllowedHosts.parse(["Example.org", "10.0.0.1:8000"]).names == {
        ("example.org", 80), ("example.org", 443), ("10.0.0.1", 8000)
    }  # fmt: skip
    for text in (
        "",
        "a..b",
        f"{'a' * 64}.org",
        "*.example.org",
        "https://example.org",
        "example.org:x",
        "user@example.org",
        "example.org/a",
    ):
        with pytest.raises(ValueError, match="is not a host"):
            AllowedHosts.parse([text])
    assert not AllowedHosts()


def test_a_name_that_leads_into_a_private_network_is_refused(monkeypatch: pytest.MonkeyPatch, server: int) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    hosts = AllowedHosts.parse([f"evil.example:{server}", f"127.0.0.1:{server}"])
    with pytest.raises(PermissionError, match="private network"):
        hosts.dial("evil.example", server)
    hosts.dial("127.0.0.1", server).close()
    for address in ("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "fe80::1%lo", "169.254.169.254", "0.0.0.0"):
        found[:] = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, server))]
        with pytest.raises(PermissionError, match="private network"):
            hosts.dial("evil.example", server)


def test_the_next_address_is_tried_where_one_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, server: int) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, server)) for address in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    connect = socket.create_connection

    def unreachable(address: tuple[str, int], **options: float) -> socket.socket:
        if address[0] == "127.0.0.2":
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return connect(address, **options)

    monkeypatch.setattr(socket, "create_connection", unreachable)
    AllowedHosts.parse([f"localhost:{server}"]).dial("localhost", server).close()


def test_a_command_has_no_more_connections_than_it_may(server: int) -> None:
    """Those that it holds are threads of this process."""
    hosts, before = AllowedHosts.parse([f"localhost:{server}"]), threading.active_count()
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hosts.served_on(listener))
        clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(100)]
        time.sleep(0.5)
        assert threading.active_count() - before <= 1 + MOST_CONNECTIONS
        for client in clients[:-1]:
            client.close()
        clients[-1].settimeout(20)
        clients[-1].sendall(f"GET http://localhost:{server}/last HTTP/1.0\r\n\r\n".encode())
        assert clients[-1].makefile("rb").read().endswith(b"you asked for /last")


@pytest.mark.parametrize(
    "line",
    [
        "CONNECT localhost:{other} HTTP/1.1",
        "CONNECT 127.0.0.1:{port} HTTP/1.1",
        "CONNECT localhost@127.0.0.1:{port} HTTP/1.1",
        "CONNECT [::1]:{port} HTTP/1.1",
        "GET http://localhost:{other}/ HTTP/1.1",
        "GET http://localhost.:{port}/ HTTP/1.1",
        "GET http://127.1:{port}/ HTTP/1.1",
        "GET //localhost HTTP/1.1",
        "GET / HTTP/1.1",
    ],
)
def test_what_is_not_allowed_to_the_letter_is_refused(server: int, line: str) -> None:
    hosts = AllowedHosts.parse([f"localhost:{server}"])
    listener = socket.create_server(("127.0.0.1", 0))
    with hosts.served_on(listener), socket.create_connection(listener.getsockname(), 20) as client:
        text = line.format(port=server, other=listener.getsockname()[1])
        client.sendall(f"{text}\r\nhost: localhost:{server}\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 403 Forbidden")


def test_landlock_allows_no_hosts(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=r"namespaces only|does not see files"):
        CommandSandbox(Isolation.LANDLOCK, tmp_path.resolve(), (), AllowedHosts.parse(["example.org"]))
