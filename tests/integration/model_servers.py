"""Servers between a checkpoint and who fetches it: a hub, its storage, and a line that breaks off."""

from __future__ import annotations

import hashlib
import io
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from minio import Minio

from services.common.settings import CommonSettings

TOKEN = "hf_0123456789"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "acme/bot"


class BreakingLine:
    """A TCP proxy that ends each connection after so many bytes to the client. 0: never."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._upstream = (host, int(port))
        self.most_bytes = 0
        self.passed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        left = self.most_bytes if counted and self.most_bytes else None
        try:
            while data := source.recv(65536):
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                self.passed += len(data) if counted else 0
                target.sendall(data)
                if left == 0:
                    break
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class Hub:
    """A repository as the hub's API shows it: small files from the hub, large ones from another host by redirect."""

    files: dict[str, bytes]
    token: str | None = None
    corrupt: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    """Other sizes than the true ones, in the list."""
    break_after: int = 0
    """Bytes of a body after which the storage hangs up."""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Which server, path, headers."""
    endpoint: str = ""
    storage: str = ""

    def entries(self) -> list[dict[str, Any]]:
        """What /tree answers."""
        found: list[dict[str, Any]] = [{"type": "directory", "path": "onnx", "oid": "0" * 40, "size": 0}]
        for name, data in self.files.items():
            size = self.sizes.get(name, len(data))
            blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            entry: dict[str, Any] = {"type": "file", "path": name, "oid": blob, "size": size}
            if name.endswith(".safetensors"):
                lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 134}
                entry |= {"oid": "1" * 40, "lfs": lfs}
            found.append(entry)
        return found

    def seen(self, server: str, part: str) -> list[dict[str, str]]:
        """Headers of the requests to one of the two whose path has this in it."""
        return [headers for name, path, headers in self.requests if name == server and part in path]


def _handler(hub: Hub, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            hub.requests.append((server, self.path, {key.lower(): value for key, value in self.headers.items()}))
            if server == "storage":
                self._send_file(self.path.rpartition("/")[2])
            elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._send(401, b'{"error":"Repository not found"}')
            elif self.path in (f"/api/models/{REPOSITORY}/revision/{name}" for name in ("main", "v1", "refs%2Fpr%2F1")):
                self._send(200, json.dumps({"id": REPOSITORY, "sha": COMMIT}).encode())
            elif match := re.fullmatch(rf"/api/models/{REPOSITORY}/tree/{COMMIT}(\?cursor=(\d+))?", self.path):
                self._send_page(int(match[2] or 0))
            elif match := re.fullmatch(rf"/{REPOSITORY}/resolve/{COMMIT}/([^/]+)", self.path):
                if match[1].endswith(".safetensors"):
                    self._send(302, b"", Location=f"{hub.storage}/blobs/{match[1]}")
                else:
                    self._send_file(match[1])
            else:
                self._send(404, b'{"error":"not found"}')

        def _send_page(self, start: int) -> None:
            entries = hub.entries()
            more = {}
            if start + 4 < len(entries):
                url = f"{hub.endpoint}/api/models/{REPOSITORY}/tree/{COMMIT}?cursor={start + 4}"
                more = {"Link": f'<{url}>; rel="next"'}
            self._send(200, json.dumps(entries[start : start + 4]).encode(), **more)

        def _send_file(self, name: str) -> None:
            data = hub.files[name]
            if name in hub.corrupt:
                data = bytes([data[0] ^ 1]) + data[1:]
            match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            begin = int(match[1]) if match else 0
            extra = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if match else {}
            self._send(206 if match else 200, data[begin:], cut=server == "storage", **extra)

        def _send(self, status: int, body: bytes, cut: bool = False, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if cut and 0 < hub.break_after < len(body):
                self.wfile.write(body[: hub.break_after])
                self.close_connection = True
            else:
                self.wfile.write(body)

    return Handler


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has had enough hangs up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Both servers of a hub, on loopback."""
    servers = [_Server(("127.0.0.1", 0), _handler(hub, name)) for name in ("hub", "storage")]
    # Two hosts: another name for the storage, as in the world.
    hub.endpoint, hub.storage = (
        f"http://{host}:{server.server_port}" for host, server in zip(("127.0.0.1", "localhost"), servers, strict=True)
    )
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


def checkpoint_files(directory: Path) -> dict[str, bytes]:
    """The files of the tiny model, and some that are no part of a checkpoint."""
    files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
    return files | {"pytorch_model.bin": b"pickle", "training_args.pt": b"pickle", ".gitattributes": b"x"}


def stored_checkpoint(settings: CommonSettings, directory: Path, prefix: str) -> Minio:
    """Puts those files under a prefix of the bucket, and near it objects that are no part of them. Returns a client."""
    keys = (settings.s3_access_key.get_secret_value(), settings.s3_secret_key.get_secret_value())
    client = Minio(settings.s3_endpoint, *keys, secure=False, region=settings.s3_region)
    near = {f"{prefix}/onnx/model.safetensors": b"x", f"{prefix}-2/config.json": b"x"}
    for name, data in ({f"{prefix}/{name}": data for name, data in checkpoint_files(directory).items()} | near).items():
        client.put_object(settings.s3_bucket, name, io.BytesIO(data), len(data))
    return client
