"""The S3 object store: whole objects, conditional writes, short timeouts.

The minio SDK signs and sends; it has no public argument for If-Match and If-None-Match, so conditional writes use its
single-PUT building block (`Minio._put_object`), in this module only. Objects are written by one PUT each, because
conditions are not dependable on multipart uploads. Listings ask for their pages themselves (`Minio._execute`), because
the SDK goes on for ever where a server's pages do.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeAlias, TypeVar
from xml.etree import ElementTree

import tenacity
import urllib3
from minio import Minio
from minio.datatypes import Object, parse_list_objects
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from minio.time import from_http_header

from services.common.errors import Conflict, NotFound, Refused, TemperError, Unavailable
from services.common.settings import CommonSettings
from services.common.storage.s3_connection import StorePool, store_credentials

RETRY_SECONDS = 4.0
"""No attempt starts later than this after the first one, so a call on a frozen server ends after one read timeout."""
ATTEMPTS = 4
_STREAM_BYTES = 1 << 20
_DIGEST = "x-amz-meta-sha256"
"""Header of an object's SHA-256: an etag is a digest on some servers only. Objects of earlier releases have none."""
_MISSING = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound"})
_REFUSED = frozenset(
    {"AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "AuthorizationHeaderMalformed", "NoSuchBucket"}
)
_UNMET = "PreconditionFailed"
_MET = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_OWNED = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})

T = TypeVar("T")
Keys: TypeAlias = list[str]
Listing: TypeAlias = "list[ListedObject]"
"""Both spelled out, because ObjectStore has a method `list`."""


class ObjectNotFound(NotFound):
    """No object has this key."""


class ObjectDamaged(Unavailable):
    """The object's bytes are not those that were written, however often they are read."""


class PreconditionFailed(Conflict):
    """The object is not in the state that a conditional write asked for."""


class _Damaged(urllib3.exceptions.HTTPError):
    """What came is not what an object store answers."""


class _DigestDiffers(_Damaged):
    """Other bytes came than were written."""


class StoreRejected(TemperError):
    """The S3 server cannot keep adapters safely."""

    code: ClassVar[str] = "store_rejected"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's bytes and its etag (without quotes)."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An object's etag, and the time since it was written by the store's own clock: no clock of ours has a say."""

    etag: str
    age: float
    """Whole seconds."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """Entry of a listing."""

    key: str
    size: int
    """Bytes."""
    modified: datetime


class ObjectStore:
    """One bucket of an S3 server. Thread-safe; every method blocks for seconds at most, conditional writes for longest.

    Every method may raise Unavailable: the server is away, frozen, or refuses the credentials.
    """

    def __init__(self, settings: CommonSettings) -> None:
        self._bucket = settings.s3_bucket
        self._endpoint = settings.s3_endpoint
        self._client = Minio(
            settings.s3_endpoint,
            credentials=store_credentials(settings),
            secure=settings.s3_secure,
            region=settings.s3_region,
            http_client=StorePool(settings),
        )

    def get(self, key: str) -> StoredObject:
        """The whole object; one whose bytes are not those that were written is read again.

        Raises:
            ObjectNotFound: there is none.
            ObjectDamaged: it stays so.
        """

        def read() -> StoredObject:
            response = self._client.get_object(self._bucket, key)
            try:
                etag, digest = _etag(response.headers), response.headers.get(_DIGEST)
                data = response.read()
                if digest is not None and hashlib.sha256(data).hexdigest() != digest:
                    raise _DigestDiffers(f"the object {key} is damaged: it does not match its SHA-256")
                return StoredObject(data, etag)
            finally:
                response.close()
                response.release_conn()

        return self._call(f"get {key}", read, of_object=True)

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        """Reads the bytes of an object from ``offset`` on into a buffer that is not empty.

        Returns:
            How many there were: fewer than asked for at the object's end.

        Raises:
            ObjectNotFound: there is no such object.
        """

        def read() -> int:
            try:
                response = self._client.get_object(self._bucket, key, offset=offset, length=len(target))
            except S3Error as error:
                if error.code == "InvalidRange":
                    return 0
                raise
            try:
                if offset and response.status != 206:
                    raise InvalidResponseError(response.status, response.headers.get("content-type"), "not the range")
                _etag(response.headers)
                count = 0
                for block in response.stream(_STREAM_BYTES):
                    block = block[: len(target) - count]
                    target[count : count + len(block)] = block
                    count += len(block)
                return count
            finally:
                response.close()
                response.release_conn()

        return self._call(f"read {key}", read, of_object=True)

    def put(self, key: str, data: bytes | memoryview, *, if_match: str | None = None, if_absent: bool = False) -> str:
        """Writes an object and returns its etag.

        Args:
            if_match: only if the object has this etag now.
            if_absent: only if there is no such object.

        Raises:
            PreconditionFailed: the condition does not hold. A write that was retried because its first answer got
                lost is recognised by its content and succeeds.
        """
        headers: dict[str, str] = {_DIGEST: hashlib.sha256(data).hexdigest()}
        if if_match is not None:
            headers["If-Match"] = f'"{if_match}"'
        if if_absent:
            headers["If-None-Match"] = "*"
        body: Any = data  # minio says bytes; it, urllib3 and sockets take any buffer
        attempts = 0

        def write() -> str:
            nonlocal attempts
            attempts += 1
            try:
                return _etag(self._client._put_object(self._bucket, key, body, headers=dict(headers)).http_headers)
            except S3Error as error:
                if if_absent and error.code == _UNMET and self.head(key) is None:  # gone since, or never there
                    raise _Damaged(f"the object {key} is said to be there and not to be") from error
                raise

        try:
            return self._call(f"put {key}", write, of_object=if_match is not None, on_condition=len(headers) > 1)
        except ObjectNotFound as error:  # AWS answers If-Match on a missing key with 404
            raise PreconditionFailed(f"object {key} does not exist any more") from error
        except PreconditionFailed:
            if attempts == 1:
                raise
            stored = self.get(key)
            if stored.data != data:
                raise
            return stored.etag

    def head(self, key: str) -> str | None:
        """The object's etag; None if there is no such object."""
        try:
            return self._call(f"head {key}", lambda: _etag(self._stat(key)), of_object=True)
        except ObjectNotFound:
            return None

    def written(self, key: str) -> WrittenObject:
        """Which object there is now, and for how long. Raises ObjectNotFound."""

        def read() -> WrittenObject:
            headers = self._stat(key)
            etag = _etag(headers)
            now, then = (from_http_header(headers.get(name, "")) for name in ("Date", "Last-Modified"))
            return WrittenObject(etag, (now - then).total_seconds())

        return self._call(f"age of {key}", read, of_object=True)

    def list(self, prefix: str, recursive: bool = True) -> Keys:
        """The keys that start with ``prefix``, sorted; not recursive: those directly under it (which ends in "/")."""

        def read() -> Keys:
            found = self._entries(prefix, recursive=recursive)
            return sorted(entry.object_name for entry in found if entry.object_name and not entry.is_dir)

        return self._call(f"list {prefix}", read)

    def list_page(self, prefix: str, after: str, limit: int) -> Keys:
        """The first keys that start with ``prefix`` and come behind it with ``after``, sorted: as many as ``limit``, in
        one request if that is at most 1,000.

        Args:
            after: end of a key; empty: from the first one on.
        """

        def read() -> Keys:
            found = self._entries(prefix, start_after=f"{prefix}{after}" if after else "")
            keys = (entry.object_name for entry in found if entry.object_name and not entry.is_dir)
            return list(itertools.islice(keys, limit))

        return self._call(f"list {prefix}", read)

    def list_objects(self, prefix: str) -> Listing:
        """The objects whose keys start with ``prefix``, sorted by key."""

        def read() -> Listing:
            found = self._entries(prefix)
            listed = (
                ListedObject(entry.object_name, entry.size or 0, entry.last_modified or datetime.fromtimestamp(0, UTC))
                for entry in found
                if entry.object_name and not entry.is_dir
            )
            return sorted(listed, key=lambda entry: entry.key)

        return self._call(f"list {prefix}", read)

    def list_dirs(self, prefix: str) -> Keys:
        """The names of the "directories" directly under ``prefix`` (which ends in "/"), sorted."""

        def read() -> Keys:
            found = self._entries(prefix, recursive=False)
            names = (entry.object_name for entry in found if entry.object_name and entry.is_dir)
            return sorted(name[len(prefix) :].rstrip("/") for name in names)

        return self._call(f"list {prefix}", read)

    def delete(self, key: str) -> None:
        """Removes an object; none there is fine."""

        def remove() -> None:
            if self._client._execute("DELETE", self._bucket, key).data:  # a success says nothing
                raise _Damaged(f"the removal of {key} is answered by something else")

        try:
            self._call(f"delete {key}", remove, of_object=True)
        except ObjectNotFound:
            return

    def delete_prefix(self, prefix: str) -> None:
        """Removes every object whose key starts with ``prefix``."""
        for key in self.list(prefix):
            self.delete(key)

    def check(self) -> None:
        """Makes the bucket and proves that the server honours conditional writes.

        Raises:
            StoreRejected: it overwrites objects although the condition does not hold.
        """
        self._call(f"make bucket {self._bucket}", self._make_bucket)
        key = f"probe/{uuid.uuid4().hex}"
        try:
            self.put(key, b"first", if_absent=True)
            for header, condition in (
                ("If-None-Match", {"if_absent": True}),
                ("If-Match", {"if_match": "0" * 32}),
            ):
                try:
                    self.put(key, b"second", **condition)
                except PreconditionFailed:
                    continue
                raise StoreRejected(
                    f"the S3 server at {self._endpoint} ignores {header}: concurrent jobs could overwrite each other's "
                    "adapters. Use a server with conditional writes (MinIO RELEASE.2024-05-07 or newer, SeaweedFS, AWS "
                    "S3), or leave TEMPER_S3_ENDPOINT unset so that `temper up` starts one"
                )
        finally:
            self.delete(key)

    def _make_bucket(self) -> None:
        if self._client.bucket_exists(self._bucket):
            return
        try:
            self._client.make_bucket(self._bucket)
        except S3Error as error:
            if error.code not in _OWNED:
                raise

    def _stat(self, key: str) -> Mapping[str, str]:
        found: Mapping[str, str] = self._client.stat_object(self._bucket, key).metadata or {}
        return found

    def _entries(self, prefix: str, *, recursive: bool = True, start_after: str = "") -> Iterator[Object]:
        """Entries of a listing, page by page; each once."""
        query = {"list-type": "2", "encoding-type": "url", "max-keys": "1000", "prefix": prefix}
        query["delimiter"] = "" if recursive else "/"
        if start_after:
            query["start-after"] = start_after
        seen: set[str | None] = set()
        more, tokens = True, {""}
        while more:
            response = self._client._execute("GET", self._bucket, query_params=dict(query))
            page, more, token, _ = parse_list_objects(response)
            fresh = [entry for entry in page if entry.object_name not in seen]
            seen.update(entry.object_name for entry in fresh)
            yield from fresh
            if more and ((token or "") in tokens or (page and not fresh)):
                raise _Damaged(f"the listing of {prefix} repeats itself")
            query["continuation-token"] = token or ""
            tokens.add(token or "")

    def _call(self, what: str, operation: Callable[[], T], *, of_object: bool = False, on_condition: bool = False) -> T:
        """Runs an operation, again if its failure may pass.

        Args:
            of_object: that there is no such object is an answer.
            on_condition: so is that the condition does not hold.
        """

        def attempt() -> T:
            try:
                return operation()
            except (ElementTree.ParseError, ValueError) as error:  # minio's, of an answer that it cannot read
                raise _Damaged(f"it cannot be read: {_first_line(error)}") from error

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_transient),
            stop=tenacity.stop_after_attempt(ATTEMPTS) | tenacity.stop_after_delay(RETRY_SECONDS),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except S3Error as error:
            if error.code in _MISSING and of_object:
                raise ObjectNotFound(f"no such object ({what})") from error
            if error.code == _UNMET and on_condition:
                raise PreconditionFailed(f"condition does not hold ({what})") from error
            raise self._translate(what, error) from error
        except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
            if isinstance(error, _DigestDiffers):
                raise ObjectDamaged(f"S3 at {self._endpoint}: {error}") from error
            raise Unavailable(f"S3 at {self._endpoint} is away ({what}): {_first_line(error)}") from error

    def _translate(self, what: str, error: S3Error) -> TemperError:
        if error.code in _REFUSED:
            return Refused(
                f"S3 at {self._endpoint} refused {what}: {error.code}; check TEMPER_S3_ACCESS_KEY, "
                "TEMPER_S3_SECRET_KEY and TEMPER_S3_BUCKET"
            )
        return Unavailable(f"S3 at {self._endpoint} failed ({what}): {error.code} {error.message}")


def _etag(headers: Mapping[str, str]) -> str:
    """An object's etag, which every answer about an object has: one without is of something else on the way."""
    etag = headers.get("etag", "").strip('"')
    if not etag:
        raise _Damaged("the answer has no ETag: it is not about an object")
    return etag


def _transient(error: BaseException) -> bool:
    if isinstance(error, S3Error):
        # 409: two conditional writes met, or two that make the bucket at a first start; one of them is to be repeated.
        return error.code in _MET or error.response.status >= 500
    return isinstance(error, urllib3.exceptions.HTTPError | ServerError | InvalidResponseError | OSError)


def _first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
