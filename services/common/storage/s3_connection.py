"""Connections to an S3 server: credentials, by a pair of keys or by the identity of a pod or instance, the time that a
request may take, and how an object leaves."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, Provider, StaticProvider
from minio.error import MinioException

from services.common.security.outbound import pool
from services.common.settings import CommonSettings

_TOKEN_SERVICE = "https://sts.amazonaws.com"
_SECONDS = 3.0
"""Timeout of one request for credentials: a machine without a metadata service has to find out before anybody gives
up."""
CONNECT_SECONDS = 2.0
READ_SECONDS = 5.0
"""Silence after which a server counts as frozen; larger bodies get a second more for every 20 MB."""
CONDITION_SECONDS = 10.0
"""Time that a conditional write gets on top. SeaweedFS decides conditions under a lock of the object's, and who finds
it taken asks again after a whole second (its `weed/cluster/lock_client.go`): the last of N at once waits for up to
N."""
_BYTES_PER_SECOND = 20e6
_CONDITIONS = frozenset({"If-Match", "If-None-Match"})
_WITH_HEAD_BYTES = 1 << 14


def store_credentials(settings: CommonSettings) -> Provider:
    """Credentials for the object store."""
    if settings.s3_credentials == "chain":
        return AmbientCredentials(settings)
    return StaticProvider(settings.s3_access_key.get_secret_value(), settings.s3_secret_key.get_secret_value())


def s3_url(endpoint: str, secure: bool) -> str:
    """URL of a server that is named host:port."""
    return f"{'https' if secure else 'http'}://{endpoint}"


class AmbientCredentials(Provider):
    """The chain of AWS: web identity, a container's credentials, or the role of the instance; anew when they end.

    What is wrong with them is an OSError, as is a server that is away: the caller repeats and tells both alike.
    """

    def __init__(self, settings: CommonSettings) -> None:
        # The token service is outside; the metadata of an instance never is.
        self._chain = IamAwsProvider(
            http_client=pool(settings, _TOKEN_SERVICE, timeout=urllib3.Timeout(_SECONDS), retries=False)
            if settings.web_identity
            else urllib3.PoolManager(timeout=urllib3.Timeout(_SECONDS), retries=False),
            region=settings.s3_region,
        )
        self._lock = threading.Lock()

    def retrieve(self) -> Credentials:
        """Raises OSError if there are none."""
        # One thread fetches, the others wait for what it got.
        with self._lock:
            try:
                return self._chain.retrieve()
            except (ValueError, KeyError, MinioException, urllib3.exceptions.HTTPError, OSError) as error:
                reason = (str(error) or type(error).__name__).splitlines()[0][:200]
                raise OSError(f"no credentials for S3 (TEMPER_S3_CREDENTIALS=chain): {reason}") from error


class StorePool(urllib3.PoolManager):
    """Connections to the object store. Every request gets its timeout, which grows with the body: a socket's timeout
    covers the whole of a send."""

    def __init__(self, settings: CommonSettings) -> None:
        super().__init__(num_pools=1)
        self._inner = pool(settings, s3_url(settings.s3_endpoint, settings.s3_secure), maxsize=16)
        self._inner.pool_classes_by_scheme = {"http": _Connections, "https": _SecureConnections}

    def urlopen(self, method: str, url: str, redirect: bool = True, **kw: Any) -> urllib3.BaseHTTPResponse:  # type: ignore[override]
        body = kw.get("body")
        extra = len(body) / _BYTES_PER_SECOND if isinstance(body, bytes | memoryview) else 0.0
        turn = CONDITION_SECONDS if _CONDITIONS & set(kw.get("headers") or ()) else 0.0
        kw["timeout"] = urllib3.Timeout(connect=CONNECT_SECONDS + extra, read=READ_SECONDS + turn + extra)
        kw["retries"] = False
        return self._inner.urlopen(method, url, redirect, **kw)


class _Connection(urllib3.connection.HTTPConnection):
    """Connection that sends the head of a request with the beginning of its body.

    SeaweedFS 4.48 takes a request whose sender died, or was cut off, between the two for an empty object, and keeps
    that in place of the one before; one that ends within its body it refuses.
    """

    _waits = False
    _head = b""

    def request(
        self, method: str, url: str, body: Any = None, headers: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._head, self._waits = b"", isinstance(body, bytes | memoryview) and len(body) > 0
        super().request(method, url, body, headers, **options)

    def send(self, data: Any) -> None:
        if self._waits:
            self._head, self._waits = bytes(data), False
            return
        head, self._head = self._head, b""
        if head:
            rest = memoryview(data)
            super().send(head + rest[:_WITH_HEAD_BYTES])
            data = rest[_WITH_HEAD_BYTES:]
        if len(data) > 0 or not head:
            super().send(data)


class _SecureConnection(_Connection, urllib3.connection.HTTPSConnection):
    pass


class _Connections(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecureConnections(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection
