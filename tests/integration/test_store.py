"""The object store against a real S3 server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.common.errors import Unavailable
from services.common.settings import CommonSettings
from services.common.storage.object_store import (
    ObjectNotFound,
    ObjectStore,
    PreconditionFailed,
    StoreRejected,
)
from services.common.storage.s3_connection import READ_SECONDS
from tests.chaos.link import Fault, Link, Weather
from tests.forked import ForkedProcess
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE


def test_objects_round_trip(store: ObjectStore) -> None:
    etag = store.put("a/b/one", b"1")
    assert store.get("a/b/one").data == b"1"
    assert store.get("a/b/one").etag == etag == store.head("a/b/one")
    store.put("a/two", b"")
    assert store.get("a/two").data == b""
    assert store.list("a/") == ["a/b/one", "a/two"]
    assert store.list("a/", recursive=False) == ["a/two"]
    assert store.list_dirs("a/") == ["b"]
    store.delete("a/two")
    store.delete("a/two")
    store.delete_prefix("a/b")
    assert store.list("") == []
    assert store.head("a/b/one") is None
    with pytest.raises(ObjectNotFound):
        store.get("a/b/one")


def write_and_die(settings: CommonSettings, data: bytes, sends: int) -> None:
    """Process that writes an object, and is killed before it sends once more."""
    left, send = sends, socket.socket.sendall

    def counted(self: socket.socket, piece: bytes, flags: int = 0) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        send(self, piece, flags)

    socket.socket.sendall = counted  # type: ignore[assignment, method-assign]
    ObjectStore(settings).put("k", data)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("before", [None, b"1"])
def test_a_writer_that_is_killed_leaves_what_was_there_or_all_that_it_wrote(
    settings: CommonSettings, store: ObjectStore, tmp_path: Path, before: bytes | None
) -> None:
    """A server that takes a head without its body for an empty object never sees one."""
    if before is not None:
        store.put("k", before)
    for size in (100_000, 1):
        data = b"2" * size
        process = ForkedProcess(write_and_die, settings, data, 1, environment=os.environ, log=tmp_path / "log")
        assert process.wait(PATIENCE) == -signal.SIGKILL, (tmp_path / "log").read_text()
        time.sleep(0.3)  # for what the server makes of the end of the connection
        found = None if store.head("k") is None else store.get("k").data
        assert found == (data if size == 1 else before)


def test_ranges_are_read_into_a_buffer(store: ObjectStore) -> None:
    data = os.urandom(3 << 20)
    store.put("big", data)
    for offset, length in ((0, 10), (5, 1 << 20), (len(data) - 7, 7), (0, len(data))):
        target = bytearray(length)
        assert store.read_into("big", offset, memoryview(target)) == length
        assert target == data[offset : offset + length]
    target = bytearray(20)
    assert store.read_into("big", len(data) - 5, memoryview(target)) == 5
    assert target == data[-5:] + bytes(15)
    assert store.read_into("big", len(data), memoryview(target)) == 0
    assert store.read_into("big", len(data) + 100, memoryview(target)) == 0
    with pytest.raises(ObjectNotFound):
        store.read_into("none", 0, memoryview(target))


def test_a_damaged_object_is_read_again_and_never_given_out(store: ObjectStore, settings: CommonSettings) -> None:
    """Bytes that change on their way, and bytes that have changed where they lie."""
    store.put("kept", b"what was written")
    damage = asyncio.run(damaged_once(settings, "kept"))
    assert damage == (b"what was written", 2)
    digest = hashlib.sha256(b"what was written").hexdigest()
    raw = store._client
    raw._put_object(store._bucket, "kept", b"what was wrItten", headers={"x-amz-meta-sha256": digest})
    with pytest.raises(Unavailable, match="the object kept is damaged"):
        store.get("kept")
    raw._put_object(store._bucket, "kept", b"of an earlier release", headers={})
    assert store.get("kept").data == b"of an earlier release"


async def damaged_once(settings: CommonSettings, key: str) -> tuple[bytes, int]:
    """What a store gives out whose first answer is damaged on its way, and how many answers it took."""
    host, _, port = settings.s3_endpoint.rpartition(":")
    link = Link("store", host, int(port), http=True)
    await link.start()
    try:
        link.become(Fault(Weather.DAMAGED, 2.0))
        through = ObjectStore(settings.model_copy(update={"s3_endpoint": f"127.0.0.1:{link.port}"}))
        data = (await asyncio.to_thread(through.get, key)).data
        return data, link.bodies
    finally:
        await link.stop()


def test_a_listing_has_sizes_and_times(store: ObjectStore) -> None:
    began = time.time()
    store.put("x/b", b"22")
    store.put("x/a/c", b"")
    store.put("y", b"1")
    listed = store.list_objects("x/")
    assert [(found.key, found.size) for found in listed] == [("x/a/c", 0), ("x/b", 2)]
    assert all(began - 5 < found.modified.timestamp() < time.time() + 5 for found in listed)
    assert store.list_objects("z/") == []


def test_a_store_tells_by_its_own_clock_how_old_an_object_is(store: ObjectStore) -> None:
    began = time.monotonic()
    etag = store.put("x/aged", b"1")
    written = store.written("x/aged")
    assert written.etag == etag
    assert -1.0 <= written.age <= time.monotonic() - began + 1.0, "a second is its resolution"
    with pytest.raises(ObjectNotFound):
        store.written("x/none")


def test_names_that_need_quoting(store: ObjectStore) -> None:
    for key in ("x/qwen%2F3.5", "x/a b+c", "x/é"):
        store.put(key, key.encode())
        assert store.get(key).data == key.encode()
    assert len(store.list("x/")) == 3


def test_large_object(store: ObjectStore) -> None:
    data = os.urandom(1 << 20) * 24
    store.put("big", memoryview(data), if_absent=True)
    assert hashlib.sha256(store.get("big").data).digest() == hashlib.sha256(data).digest()


def test_conditional_writes(store: ObjectStore) -> None:
    first = store.put("k", b"1", if_absent=True)
    with pytest.raises(PreconditionFailed):
        store.put("k", b"2", if_absent=True)
    second = store.put("k", b"2", if_match=first)
    with pytest.raises(PreconditionFailed):
        store.put("k", b"3", if_match=first)
    with pytest.raises(PreconditionFailed):
        store.put("none", b"3", if_match=first)
    assert store.get("k").data == b"2"
    assert store.head("k") == second


def test_one_of_many_concurrent_creators_wins(store: ObjectStore) -> None:
    def create(key: str, number: int) -> bool:
        try:
            store.put(key, str(number).encode(), if_absent=True)
        except PreconditionFailed:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for round_number in range(4):
            wins = list(pool.map(lambda n, key=f"race/{round_number}": create(key, n), range(8)))
            assert wins.count(True) == 1
            assert store.get(f"race/{round_number}").data == str(wins.index(True)).encode()


def test_compare_and_swap_loses_no_update(store: ObjectStore) -> None:
    store.put("counter", b"0")

    def increment(_: int) -> None:
        while True:
            now = store.get("counter")
            try:
                store.put("counter", str(int(now.data) + 1).encode(), if_match=now.etag)
                return
            except PreconditionFailed:
                continue

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(increment, range(30)))
    assert store.get("counter").data == b"30"


def test_a_writer_with_a_condition_waits_for_its_turn(store: ObjectStore, s3: RunningServer) -> None:
    """A lock that others hold keeps a conditional write waiting for longer than a frozen server any other request."""
    etag = store.put("k", b"1")
    with ThreadPoolExecutor(1) as pool:
        with s3.frozen():
            write = pool.submit(store.put, "k", b"2", if_match=etag)
            time.sleep(READ_SECONDS + 1.5)
            assert not write.done()
        assert write.result() == store.head("k")
    assert store.get("k").data == b"2"


def test_frozen_server_is_unavailable_within_seconds(store: ObjectStore, s3: RunningServer) -> None:
    store.put("k", b"1")
    with s3.frozen():
        began = time.monotonic()
        with pytest.raises(Unavailable):
            store.get("k")
        assert time.monotonic() - began < 60
    assert store.get("k").data == b"1"


def test_restarted_server_keeps_objects(store: ObjectStore, s3: RunningServer) -> None:
    store.put("k", b"1")
    with s3.down():
        began = time.monotonic()
        with pytest.raises(Unavailable, match="is away"):
            store.get("k")
        assert time.monotonic() - began < 60
    assert store.get("k").data == b"1"
    store.put("k", b"2" * 5000)
    assert store.get("k").data == b"2" * 5000


def test_wrong_secret_names_the_settings(s3: RunningServer, settings: CommonSettings) -> None:
    wrong = ObjectStore(settings.model_copy(update={"s3_secret_key": SecretStr("wrong")}))
    with pytest.raises(Unavailable, match="TEMPER_S3_SECRET_KEY"):
        wrong.check()


class _IgnoresConditions(BaseHTTPRequestHandler):
    """An S3 server that takes every write, as some gateways do."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(204 if self.command == "DELETE" else 200)
        self.send_header("ETag", '"00"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_HEAD = do_DELETE = do_GET = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def careless_endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _IgnoresConditions)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_store_without_conditional_writes_is_refused(careless_endpoint: str) -> None:
    store = ObjectStore(CommonSettings(s3_endpoint=careless_endpoint))
    with pytest.raises(StoreRejected, match="ignores If-None-Match"):
        store.check()


def test_nobody_listens(settings: CommonSettings) -> None:
    store = ObjectStore(settings.model_copy(update={"s3_endpoint": "127.0.0.1:1"}))
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 is away"):
        store.check()
