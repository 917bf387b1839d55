"""Hosts that commands may reach: a real command, a real proxy, real servers on this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.common.security.sandbox.allowed_hosts import AllowedHosts
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
    for text in ("", "*.example.org", "https://example.org", "example.org:x", "user@example.org", "example.org/a"):
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


def test_landlock_allows_no_hosts(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=r"namespaces only|does not see files"):
        CommandSandbox(Isolation.LANDLOCK, tmp_path.resolve(), (), AllowedHosts.parse(["example.org"]))
