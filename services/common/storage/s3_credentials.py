"""Credentials for an S3 server: with a pair of keys, or by the identity of its pod or instance."""

from __future__ import annotations

import threading

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
