"""/v1/files over an object store in memory."""

from __future__ import annotations

import time

import httpx
import openai
import pytest

from services.common.errors import NotFound, PayloadTooLarge, Unavailable
from services.gateway.api.batches.files import clean_name
from services.gateway.core.file_store import PIECE_BYTES, FileStore, NewFile, new_file_id
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_stores import MemoryStore

LINE = b'{"custom_id": "a"}\n'


def upload(http: httpx.Client, content: bytes = LINE, name: str = "in.jsonl", **fields: str) -> httpx.Response:
    return http.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch", **fields})


def test_life_of_a_file(client: openai.OpenAI, running: Running) -> None:
    content = b"x" * (2 * PIECE_BYTES + 5)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "in.jsonl", "batch", "processed")
    assert abs(file.created_at - time.time()) < 10
    assert client.files.retrieve(file.id) == file
    assert [found.id for found in client.files.list()] == [file.id]
    assert client.files.content(file.id).read() == content
    assert len([key for key in running.store.objects if key.startswith("files/")]) == 4  # three pieces, file.json
    assert client.files.delete(file.id).deleted
    assert running.store.objects == {}
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_pages(client: openai.OpenAI) -> None:
    ids = [client.files.create(file=("f", LINE), purpose="batch").id for _ in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]  # the client asks for page after page
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    page = client.files.list(limit=2, after=ids[3])
    assert [file.id for file in page.data] == [ids[2], ids[1]]
    assert page.has_more
    assert client.files.list(purpose="batch_output").data == []
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.list(after=new_file_id())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "vision"}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"extra": "1"}, "extra"),
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1e5"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, running: Running, fields: dict[str, str], param: str) -> None:
    response = upload(http, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert running.store.objects == {}


def test_bad_forms(http: httpx.Client, running: Running) -> None:
    assert http.post("/v1/files", json={"purpose": "batch"}).status_code == 400
    assert http.post("/v1/files", data={"purpose": "batch"}).status_code == 400
    assert http.post("/v1/files", files={"file": ("f", LINE)}).json()["error"]["param"] == "purpose"
    assert http.post("/v1/files", files={"file": (None, "text")}, data={"purpose": "batch"}).status_code == 400
    assert upload(http, b"").json()["error"]["param"] == "file"
    head = {"content-type": "multipart/form-data"}
    assert http.post("/v1/files", content=b"--x", headers=head).status_code == 400
    twice = [("file", ("a", LINE)), ("file", ("b", LINE))]
    assert http.post("/v1/files", files=twice, data={"purpose": "batch"}).status_code == 400
    assert running.store.objects == {}


def test_too_large(start: Starter) -> None:
    running = start(max_file_bytes=200_000)
    with httpx.Client(base_url=running.url, verify=False, timeout=PATIENCE) as http:
        response = upload(http, b"x" * 200_001)
        assert response.status_code == 413
        assert response.json()["error"] == {
            "message": "the file is over the limit of 200000 bytes: split it",
            "type": "invalid_request_error",
            "param": "file",
            "code": "payload_too_large",
        }
        assert upload(http, b"x" * 400_000).status_code == 413  # stopped while it is read
        assert upload(http, b"x" * 200_000).status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("in.jsonl", "in.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\temp\\in.jsonl", "in.jsonl"),
        ("..", "upload.jsonl"),
        ("a\r\nx-evil: 1\x1b[31m", "ax-evil: 1[31m"),
        ("", "upload.jsonl"),
        ("ä" * 300, "ä" * 127),
        ("\u202egnp.jsonl", "gnp.jsonl"),
    ],
)
def test_names_are_no_paths(given: str, kept: str) -> None:
    assert clean_name(given) == kept


def test_the_store_is_away(http: httpx.Client, running: Running) -> None:
    file = upload(http).json()["id"]
    running.store.down = True
    for response in (upload(http), http.get("/v1/files"), http.get(f"/v1/files/{file}/content")):
        assert response.status_code == 503
        assert response.headers["retry-after"]


@pytest.mark.parametrize("name", ["file-x", "..", "file-" + "0" * 26 + "x", "%2e%2e%2fbatches", "a%00b"])
def test_an_id_is_no_path(http: httpx.Client, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
        assert http.get(path).status_code == 404


def stored(files: FileStore, owner: str, *, created: int, seconds: int | None = None) -> str:
    new = NewFile(owner, new_file_id(), "f", "batch", created, seconds)
    return files.create(new, [LINE]).id


def test_an_owner_sees_its_own_files_only() -> None:
    store = MemoryStore()
    files = FileStore(store)  # type: ignore[arg-type]
    mine = stored(files, "me", created=1)
    assert files.get("me", mine).bytes == len(LINE)
    assert files.ids("you") == []
    for call in (files.get, files.delete):
        with pytest.raises(NotFound):
            call("you", mine)
    assert files.ids("me") == [mine]


def test_expired_files_are_gone_and_then_removed() -> None:
    store = MemoryStore()
    files = FileStore(store)  # type: ignore[arg-type]
    now = int(time.time())
    kept = [stored(files, "me", created=now), stored(files, "me", created=now, seconds=3600)]
    expired = stored(files, "me", created=now - 3600, seconds=3600)
    with pytest.raises(NotFound):
        files.get("me", expired)
    assert files.sweep() == 1
    assert files.sweep() == 0
    assert files.ids("me") == sorted(kept)
    assert not [key for key in store.objects if expired in key]


def test_nothing_is_left_of_content_that_is_refused_in_the_middle() -> None:
    store = MemoryStore()
    files = FileStore(store)  # type: ignore[arg-type]

    def content():
        yield b"x" * PIECE_BYTES
        raise PayloadTooLarge("that is enough")

    with pytest.raises(PayloadTooLarge):
        files.create(NewFile("me", new_file_id(), "f", "batch", 1), content())
    assert store.objects == {}


def test_what_an_interrupted_upload_left_is_removed() -> None:
    store = MemoryStore()
    files = FileStore(store)  # type: ignore[arg-type]

    def content():
        yield b"x" * PIECE_BYTES
        store.down = True
        yield b"y"

    with pytest.raises(Unavailable):
        files.create(NewFile("me", new_file_id(), "f", "batch", 1), content())
    store.down = False
    assert len(store.objects) == 2  # a piece, and the note to look at it
    (note,) = [key for key in store.objects if key.startswith("file-expiry/")]
    assert files.sweep() == 0
    store.objects[note.replace(note.split("/")[1], "000000000001")] = store.objects.pop(note)
    assert files.sweep() == 1
    assert store.objects == {}


def test_a_broken_source_leaves_nothing() -> None:
    store = MemoryStore()

    def content():
        yield b"x" * PIECE_BYTES
        raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        FileStore(store).create(NewFile("me", new_file_id(), "f", "batch", 1), content())  # type: ignore[arg-type]
    assert store.objects == {}


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    named = "" if filename is None else f'; filename="{filename}"'
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n"


WHOLE = part("file", LINE, "in.jsonl") + part("purpose", b"batch") + part("expires_after[anchor]", b"created_at")
SECONDS = part("expires_after[seconds]", b"3600")


@pytest.mark.parametrize("route", ["/v1/files", "/v1/adapters"])
def test_a_form_that_does_not_come_to_its_end_is_refused(running: Running, http: httpx.Client, route: str) -> None:
    """Its last part would be left out, as if it had not been sent: a file that was to expire would stay for ever."""
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for body in (part("file", LINE, "in.jsonl") + part("purpose", b"batch") + SECONDS[:-2], WHOLE + SECONDS, b""):
        error = http.post(route, content=body, headers=headers).json()["error"]
        assert "ends before its closing boundary" in error["message"]
    assert running.store.objects == {}
    if route == "/v1/files":
        kept = http.post(route, content=WHOLE + SECONDS + b"--x--", headers=headers).json()
        assert kept["expires_at"] == kept["created_at"] + 3600


@pytest.mark.parametrize("route", ["/v1/files", "/v1/adapters"])
@pytest.mark.parametrize("charset", ["undefined", "utf-7", "utf-16", "unicode_escape", "nope"])
def test_forms_are_utf_8(http: httpx.Client, route: str, charset: str) -> None:
    """Python's codecs have some that always fail, and some that read half characters out of ASCII."""
    headers = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
    answer = http.post(route, content=WHOLE + SECONDS + part("+2AA-", b"x") + b"--x--\r\n", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-type")
    assert repr(charset) in answer.json()["error"]["message"]
