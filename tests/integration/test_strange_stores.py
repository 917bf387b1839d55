"""Object stores, or what stands before them, that answer what nobody asked: whoever asks is told that they are away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from services.common.errors import TemperError, Unavailable
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectNotFound, ObjectStore, PreconditionFailed

XML = "application/xml"


@dataclass(frozen=True)
class Answer:
    """What a server says."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def error(status: int, code: str) -> Answer:
    return Answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode(), {"Content-Type": XML})


@contextmanager
def answering(script: Callable[[str, str, dict[str, list[str]]], Answer]) -> Iterator[ObjectStore]:
    """A store whose server says what a script makes of a request's method, path and query."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            answer = script(self.command, url.path, parse_qs(url.query))
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_PUT = do_HEAD = do_DELETE = do_GET = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield ObjectStore(CommonSettings(s3_endpoint=f"127.0.0.1:{server.server_address[1]}"))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


ANSWERS = {
    "error-as-success": error(200, "InternalError"),
    "page-of-a-proxy": Answer(200, b"<html>sign in</html>", {"Content-Type": "text/html"}),
    "nothing": Answer(200),
    "conflict-of-nothing": Answer(409),
    "no-utf8": Answer(403, b"\xff<", {"Content-Type": XML}),
    "cut-xml": Answer(500, b"<Error", {"Content-Type": XML}),
    "moved": Answer(301, b"", {"Location": "http://127.0.0.1:1/elsewhere"}),
    "unmet": error(412, "PreconditionFailed"),
    "none": error(404, "NoSuchKey"),
}
CALLS: Mapping[str, Callable[[ObjectStore, str], object]] = {
    "get": lambda store, key: store.get(key),
    "read": lambda store, key: store.read_into(key, 1, memoryview(bytearray(4))),
    "put": lambda store, key: store.put(key, b"x"),
    "put-match": lambda store, key: store.put(key, b"x", if_match="00"),
    "put-absent": lambda store, key: store.put(key, b"x", if_absent=True),
    "head": lambda store, key: store.head(key),
    "written": lambda store, key: store.written(key),
    "list": lambda store, key: store.list(f"{key}/"),
    "dirs": lambda store, key: store.list_dirs(f"{key}/"),
    "delete": lambda store, key: store.delete(key),
}
MEANT: Mapping[tuple[str, str], object] = {
    ("nothing", "delete"): None,
    ("unmet", "put-match"): PreconditionFailed,
    ("none", "get"): ObjectNotFound,
    ("none", "read"): ObjectNotFound,
    ("none", "head"): None,
    ("none", "written"): ObjectNotFound,
    ("none", "put-match"): PreconditionFailed,
    ("none", "delete"): None,
}
"""Of each answer and call, what it is where it is not Unavailable."""


def test_what_no_store_answers_is_not_taken_for_an_answer() -> None:
    """Nothing is believed to be written, read, absent or changed by others that was not said to be."""

    def outcome(case: tuple[str, str]) -> object:
        try:
            return CALLS[case[1]](store, case[0])
        except TemperError as found:
            return Unavailable if isinstance(found, Unavailable) else type(found)

    def script(method: str, path: str, query: dict[str, list[str]]) -> Answer:
        return ANSWERS[query["prefix"][0].strip("/") if "prefix" in query else path.rpartition("/")[2]]

    cases = [(answer, call) for answer in ANSWERS for call in CALLS]
    with answering(script) as store, ThreadPoolExecutor(16) as pool:
        found = dict(zip(cases, pool.map(outcome, cases), strict=True))
    assert found == {case: MEANT.get(case, Unavailable) for case in cases}


def test_a_store_that_does_not_say_how_old_an_object_is_is_away() -> None:
    with answering(lambda method, path, query: Answer(200, b"x", {"ETag": '"00"'})) as store:
        assert store.head("a") == "00"
        with pytest.raises(Unavailable, match=r"age of a.*cannot be read"):
            store.written("a")


def page(keys: list[str], token: str) -> Answer:
    """A page of a listing; with a token there are more."""
    more = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
    more += f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    entries = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
    body = f"<ListBucketResult><Name>temper</Name>{more}{entries}</ListBucketResult>"
    return Answer(200, body.encode(), {"Content-Type": XML})


@pytest.mark.parametrize("pages", ["the same", "empty", "under new names"])
@pytest.mark.timeout(60)
def test_a_listing_that_never_ends_is_given_up(pages: str) -> None:
    asked = 0

    def script(method: str, path: str, query: dict[str, list[str]]) -> Answer:
        nonlocal asked
        asked += 1
        token = f"t{asked}" if pages == "under new names" else "t"
        return page([] if pages == "empty" else ["a/1", "a/2"], token)

    with answering(script) as store, pytest.raises(Unavailable, match="repeats itself"):
        store.list("a/")


def test_pages_that_overlap_list_each_key_once() -> None:
    pages = {"": page(["a/1", "a/2"], "one"), "one": page([], "two"), "two": page(["a/2", "a/3"], "")}

    def script(method: str, path: str, query: dict[str, list[str]]) -> Answer:
        return pages[query.get("continuation-token", [""])[0]]

    with answering(script) as store:
        assert store.list("a/") == ["a/1", "a/2", "a/3"]


def test_a_condition_that_fails_for_nothing_is_tried_again() -> None:
    """The key is said to be taken, and nothing is there."""
    writes = 0

    def script(method: str, path: str, query: dict[str, list[str]]) -> Answer:
        nonlocal writes
        if method == "HEAD":
            return Answer(404)
        writes += 1
        return error(412, "PreconditionFailed") if writes == 1 else Answer(200, headers={"ETag": '"e"'})

    with answering(script) as store:
        assert store.put("a", b"x", if_absent=True) == "e"
