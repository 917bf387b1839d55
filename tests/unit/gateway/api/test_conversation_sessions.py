"""/v1/sessions: what engines keep of conversations."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from services.common.security.api_keys import Scope
from services.engine.requests.conversation_session import SessionName
from services.gateway.protocol.sessions import DeletedSession, SessionList, SessionObject
from tests.stack import PATIENCE
from tests.unit.engine.server.memory_sessions import MAGIC, PIECE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.key_file import NO_REDIS, Keys, error_of

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ROUTE = "/v1/sessions"


def names(http: httpx.Client, **query: Any) -> list[str]:
    answer = http.get(ROUTE, params=query)
    assert answer.status_code == 200, answer.text
    SessionList.model_validate_json(answer.content, strict=True)
    return [session["id"] for session in answer.json()["data"]]


@pytest.fixture
def two(start: Starter) -> Running:
    return start(FakeEngine(), FakeEngine())


@pytest.fixture
def http_two(two: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=two.url, timeout=PATIENCE, verify=False) as client:
        yield client


def test_a_session_is_told(running: Running, http: httpx.Client) -> None:
    running.engine.histories.keep("", "talk", b"12345", used=100.9)
    found = http.get(f"{ROUTE}/talk")
    assert found.status_code == 200
    SessionObject.model_validate_json(found.content, strict=True)
    (client,) = running.inference.engines.clients
    assert found.json() == {
        "id": "talk",
        "object": "session",
        "tokens": 5,
        "requests": 1,
        "adapter": "bot@2",
        "created_at": 1,
        "used_at": 100,
        "expires_at": 160,
        "saved": False,
        "bytes": {"device": 5},
        "engine": client.id,
    }
    assert http.get(ROUTE).json()["data"] == [found.json()]
    saved = http.post(f"{ROUTE}/talk/save")
    assert (saved.status_code, saved.json()) == (200, found.json() | {"saved": True})
    gone = http.delete(f"{ROUTE}/talk")
    DeletedSession.model_validate_json(gone.content, strict=True)
    assert gone.json() == {"id": "talk", "object": "session", "deleted": True}
    assert not running.engine.histories.kept


def test_a_session_that_nobody_has(running: Running, http: httpx.Client) -> None:
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/save"),
        ("GET", "/export"),
    ):
        error = error_of(http.request(method, f"{ROUTE}/none{path}"), 404)
        assert (error["param"], error["code"]) == ("session_id", "not_found")
        assert "'none'" in error["message"]
    assert error_of(http.get(ROUTE, params={"after": "none"}), 404)["param"] == "after"
    for wrong in ("", "x" * 257):
        assert error_of(http.get(f"{ROUTE}/{wrong}"), 400)["param"] == "session_id"
    assert error_of(http.get(ROUTE, params={"limit": 0}), 400)["param"] == "limit"


def test_pages(running: Running, http: httpx.Client) -> None:
    assert http.get(ROUTE).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    for number in range(5):
        running.engine.histories.keep("", f"s{number}", used=float(number))
    running.engine.histories.keep("somebody", "else", used=9.0)
    assert names(http) == ["s4", "s3", "s2", "s1", "s0"]
    page = http.get(ROUTE, params={"limit": 2, "after": "s3"}).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("s2", "s1", True)
    assert names(http, after="s1") == ["s0"]


def test_tiers_are_told_fastest_first(running: Running, http: httpx.Client) -> None:
    kept = running.engine.histories.keep("", "talk")
    sizes = {"store": 1, "disk": 2, "device": 3, "host": 4}
    running.engine.histories.kept[kept.session] = replace(kept, sizes=sizes), b""
    assert list(http.get(f"{ROUTE}/talk").json()["bytes"]) == ["device", "host", "disk", "store"]


def test_what_cannot_be_saved(running: Running, http: httpx.Client) -> None:
    running.engine.histories.keep("", "talk")
    running.engine.histories.can_save = False
    try:
        assert "TEMPER_TIERS" in error_of(http.post(f"{ROUTE}/talk/save"), 400)["message"]
    finally:
        running.engine.histories.can_save = True


@pytest.mark.parametrize("name", ["a/b", "team/../x", "ünï cödé", "a%2Fb", "x.y:z", "export", "?#"])
def test_any_name_will_do(running: Running, http: httpx.Client, name: str) -> None:
    path = f"{ROUTE}/{quote(name, safe='')}"
    data = MAGIC + b"what was said"
    imported = http.put(f"{path}/import", content=data)
    assert (imported.status_code, imported.json()["id"]) == (200, name), imported.text
    assert http.get(path).json()["id"] == name
    exported = http.get(f"{path}/export")
    assert exported.content == data
    assert exported.headers["content-disposition"].endswith(".session")
    assert http.delete(path).json()["id"] == name


# -- files


def test_a_session_goes_through_without_being_kept(running: Running, http: httpx.Client) -> None:
    data = bytes(range(256)) * 4096 * 8
    running.engine.histories.keep("", "talk", data)
    with http.stream("GET", f"{ROUTE}/talk/export") as exported:
        assert exported.headers["content-type"] == "application/octet-stream"
        assert exported.headers["content-disposition"] == "attachment; filename*=UTF-8''talk.session"
        content = b"".join(exported.iter_bytes())
    assert content == MAGIC + data

    def pieces() -> Iterator[bytes]:
        yield from (content[start : start + 100_000] for start in range(0, len(content), 100_000))

    imported = http.put(f"{ROUTE}/copy/import", content=pieces())
    SessionObject.model_validate_json(imported.content, strict=True)
    assert imported.json()["tokens"] == len(data)
    assert running.engine.histories.kept[SessionName("", "copy")][1] == data
    assert not running.engine.histories.open


def test_an_export_goes_at_its_readers_pace(start: Starter) -> None:
    running = start(send_buffer=65536)
    size = 64 * 2**20
    running.engine.histories.keep("", "talk", bytes(size))
    with (
        httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http,
        http.stream("GET", f"{ROUTE}/talk/export") as exported,
    ):
        next(exported.iter_raw(1000))
        before = -1
        while running.engine.histories.handed != before:
            before = running.engine.histories.handed
            time.sleep(0.4)
        assert before < size // PIECE // 2
    running.wait_for(lambda: not running.engine.histories.open)


def test_an_import_goes_at_the_engines_pace(running: Running) -> None:
    histories = running.engine.histories
    histories.taken = 0
    histories.go_on.clear()
    sent = 0
    try:
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as connection:
            connection.settimeout(2)
            size = 256 * 2**20
            head = f"PUT {ROUTE}/big/import HTTP/1.1\r\nhost: x\r\ncontent-length: {size + len(MAGIC)}\r\n\r\n"
            connection.sendall(head.encode() + MAGIC)
            try:
                while sent < size:
                    sent += connection.send(bytes(2**20))
            except TimeoutError:
                pass
            assert 0 < sent < size // 2, "what the engine does not take is not read from the client"
        running.wait_for(lambda: histories.taken > 0)
    finally:
        histories.go_on.set()
    running.wait_for(lambda: not histories.open)
    assert not histories.kept, "the client went away in the middle"


def test_imports_that_are_refused(start: Starter) -> None:
    running = start(max_session_bytes=2**20)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        damaged = http.put(f"{ROUTE}/x/import", content=b"something else")
        assert "not an exported session" in error_of(damaged, 400)["message"]
        assert damaged.headers["connection"] == "close"
        for content in (bytes(2**20 + 1), iter([MAGIC, bytes(2**20), b"x"])):
            large = http.put(f"{ROUTE}/x/import", content=content)
            assert error_of(large, 413)["code"] == "payload_too_large"
            assert large.headers["connection"] == "close"
        assert (
            error_of(http.put(f"{ROUTE}/x/import", params={"key_id": "k-1"}, content=MAGIC), 400)["param"] == "key_id"
        )
        assert not running.engine.histories.kept
        fits = http.put(f"{ROUTE}/x/import", content=MAGIC + bytes(2**20 - len(MAGIC)))
        assert fits.status_code == 200
        assert http.post(f"{ROUTE}/x/save", content=bytes(2**20)).status_code == 200, "an ordinary body, and unread"


def test_an_engine_lost_in_the_middle_of_an_export(start: Starter) -> None:
    running = start(send_buffer=65536)
    running.engine.histories.keep("", "talk", bytes(64 * 2**20))
    with (
        httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http,
        http.stream("GET", f"{ROUTE}/talk/export") as exported,
    ):
        parts = exported.iter_raw(1000)
        next(parts)
        running.run(running.engine.stop())
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in parts:
                pass


# -- many engines


def test_sessions_of_all_engines_are_one_list(two: Running, http_two: httpx.Client) -> None:
    first, second = (engine.histories for engine in two.engines)
    first.keep("", "a", b"1", used=10.0)
    second.keep("", "a", b"22", used=20.0)
    second.keep("", "b", b"", used=15.0)
    assert names(http_two) == ["a", "b"]
    ids = {f"127.0.0.1:{engine.port}": engine for engine in two.engines}
    by_id = {client.id: ids[client.address] for client in two.inference.engines.clients}
    for found in (http_two.get(f"{ROUTE}/a").json(), http_two.get(ROUTE).json()["data"][0]):
        assert (found["tokens"], by_id[found["engine"]]) == (2, two.engines[1]), "the one that was used last"
    assert http_two.get(f"{ROUTE}/a/export").content == MAGIC + b"22"
    assert http_two.post(f"{ROUTE}/a/save").status_code == 200
    assert [kept.saved for kept, _ in first.kept.values()] == [False]
    assert http_two.delete(f"{ROUTE}/a").status_code == 200
    assert names(http_two) == ["b"], "deleted everywhere"
    assert not first.kept


def test_the_engine_of_a_session_is_asked_first(two: Running, http_two: httpx.Client) -> None:
    home = http_two.post("/v1/chat/completions", json=CHAT | {"session_id": "s"}).json()["usage"]["session"]["engine"]
    at_home = next(client for client in two.inference.engines.clients if client.id == home)
    (engine,) = (engine for engine in two.engines if at_home.address.endswith(f":{engine.port}"))
    (other,) = (one for one in two.engines if one is not engine)
    other.histories.keep("", "s", b"22", used=20.0)
    assert http_two.get(f"{ROUTE}/s").json()["tokens"] == 2, "it was there once"
    engine.histories.keep("", "s", b"1", used=10.0)
    other.histories.threads.clear()
    assert http_two.get(f"{ROUTE}/s").json()["tokens"] == 1
    assert not other.histories.threads, "nobody else is asked"


def test_requests_follow_an_import(two: Running, http_two: httpx.Client) -> None:
    used = set()
    for number in range(6):
        where = http_two.put(f"{ROUTE}/s{number}/import", content=MAGIC).json()["engine"]
        for _ in range(2):
            usage = http_two.post("/v1/chat/completions", json=CHAT | {"session_id": f"s{number}"}).json()["usage"]
            assert usage["session"]["engine"] == where
        again = http_two.put(f"{ROUTE}/s{number}/import", content=MAGIC).json()["engine"]
        assert again == where, "it stays where it is"
        used.add(where)
    assert used


def test_an_engine_that_is_away(two: Running, http_two: httpx.Client) -> None:
    for engine in two.engines:
        engine.histories.keep("", "s", used=1.0)
    clients = {client.address: client for client in two.inference.engines.clients}
    gone = two.engines[0]
    address = f"127.0.0.1:{gone.port}"
    two.run(gone.stop())
    two.wait_for(lambda: not clients[address].connected)
    assert names(http_two) == ["s"]
    assert http_two.get(f"{ROUTE}/s").status_code == 200
    error = error_of(http_two.delete(f"{ROUTE}/s"), 503)
    assert re.search(rf"{clients[address].id} may still have the session 's'", error["message"])
    assert not two.engines[1].histories.kept, "whoever is there has forgotten it"
    two.run(two.engines[1].stop())
    two.wait_for(lambda: not any(client.connected for client in clients.values()))
    for path in ("", "/s"):
        error_of(http_two.get(f"{ROUTE}{path}"), 503)
    error_of(http_two.put(f"{ROUTE}/s/import", content=MAGIC), 503)


# -- keys


def test_sessions_are_their_keys(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    for name, scopes in (("one", [Scope.INFERENCE]), ("two", [Scope.INFERENCE]), ("boss", [Scope.ADMIN])):
        keys.add(name, *scopes)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    ids = {name: entry.id for name, entry in keys.entries.items()}
    running.engine.histories.keep(ids["one"], "talk", b"secret")
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        one, two, boss = (keys.bearer(name) for name in ("one", "two", "boss"))
        assert [entry["id"] for entry in http.get(ROUTE, headers=one).json()["data"]] == ["talk"]
        assert http.get(ROUTE, headers=two).json()["data"] == []
        for method, path in (("GET", ""), ("GET", "/export"), ("POST", "/save"), ("DELETE", "")):
            error_of(http.request(method, f"{ROUTE}/talk{path}", headers=two), 404)
            error_of(http.request(method, f"{ROUTE}/talk{path}", headers=boss), 403)
            error_of(http.request(method, f"{ROUTE}/talk{path}"), 401)
        exported = http.get(f"{ROUTE}/talk/export", headers=one).content
        assert exported == MAGIC + b"secret"
        error_of(http.put(f"{ROUTE}/talk/import", headers=one, content=exported), 403)
        assert http.put(f"{ROUTE}/mine/import", headers=boss, content=exported).status_code == 200
        for_two = {"key_id": ids["two"]}
        assert http.put(f"{ROUTE}/given/import", params=for_two, headers=boss, content=exported).status_code == 200
        assert {tuple(session) for session in running.engine.histories.kept} == {
            (ids["one"], "talk"),
            (ids["boss"], "mine"),
            (ids["two"], "given"),
        }
        assert [entry["id"] for entry in http.get(ROUTE, headers=two).json()["data"]] == ["given"]
        wrong = http.put(f"{ROUTE}/x/import", params={"key_id": "no/id"}, headers=boss, content=exported)
        assert error_of(wrong, 400)["param"] == "key_id"
