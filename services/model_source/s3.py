"""A checkpoint under a prefix of an S3 bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import urllib3
from minio import Minio
from minio.credentials.providers import Provider, StaticProvider
from minio.error import MinioException, S3Error

from services.common.security.outbound import pool
from services.common.storage.s3_connection import AmbientCredentials, s3_url
from services.model_source.errors import SourceBroken, SourceRejected, one_line
from services.model_source.files import RemoteFile, is_wanted
from services.model_source.settings import ModelSourceSettings
from services.model_source.streams import blocks

_CONNECT_SECONDS = 5.0


class S3Source:
    """The objects directly under ``prefix``."""

    def __init__(self, settings: ModelSourceSettings, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = settings.model_s3_endpoint or settings.s3_endpoint
        secure = settings.s3_secure if settings.model_s3_secure is None else settings.model_s3_secure
        try:
            self._client = Minio(
                self._endpoint,
                credentials=_credentials(settings),
                secure=secure,
                region=settings.model_s3_region or settings.s3_region,
                http_client=pool(
                    settings,
                    s3_url(self._endpoint, secure),
                    maxsize=settings.model_connections,
                    timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=settings.model_timeout_seconds),
                    retries=False,
                ),
            )
        except ValueError as error:
            raise SourceRejected("TEMPER_MODEL_S3_ENDPOINT", one_line([error])) from error

    def __str__(self) -> str:
        return f"s3://{self._bucket}/{self._prefix.rstrip('/')} on {self._endpoint}"

    def files(self) -> list[RemoteFile]:
        try:
            found = list(self._client.list_objects(self._bucket, prefix=self._prefix, recursive=False))
        except S3Error as error:
            raise self._translate(error) from error
        except (MinioException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise SourceBroken(f"S3 at {self._endpoint} is away: {one_line([error])}") from error
        files = []
        for entry in found:
            name = (entry.object_name or "").removeprefix(self._prefix)
            if not entry.is_dir and is_wanted(name):
                files.append(RemoteFile(name, entry.size or 0, (entry.etag or "").strip('"')))
        return files

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        # An object that is written anew meanwhile must not become the second half of this one.
        headers: dict[str, str | list[str] | tuple[str]] = {"If-Match": f'"{file.version}"'}
        try:
            response = self._client.get_object(
                self._bucket, self._prefix + file.name, offset=offset, request_headers=headers
            )
        except S3Error as error:
            if error.code == "PreconditionFailed":
                raise SourceRejected(
                    "TEMPER_MODEL_SOURCE", f"{file.name} changed while it was fetched: start again"
                ) from error
            raise self._translate(error) from error
        except (MinioException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise SourceBroken(f"S3 at {self._endpoint} is away: {one_line([error])}") from error
        try:
            yield (offset if response.status == 206 else 0), blocks(response)
        finally:
            response.close()
            response.release_conn()

    def _translate(self, error: S3Error) -> SourceRejected | SourceBroken:
        if error.code in ("NoSuchBucket", "NoSuchKey", "NotFound"):
            return SourceRejected("TEMPER_MODEL_SOURCE", f"{self} is not there: {error.code}")
        if error.response.status in (400, 401, 403):
            return SourceRejected(
                "TEMPER_MODEL_S3_ACCESS_KEY and TEMPER_MODEL_S3_SECRET_KEY (or TEMPER_S3_ACCESS_KEY, "
                "TEMPER_S3_SECRET_KEY)",
                f"{self} refuses them: {error.code}",
            )
        return SourceBroken(f"{self} failed: {one_line([error.code, error.message])}")


def _credentials(settings: ModelSourceSettings) -> Provider | None:
    """None: nothing is signed."""
    if (settings.model_s3_credentials or settings.s3_credentials) == "chain":
        return AmbientCredentials(settings)
    given = (settings.model_s3_access_key, settings.model_s3_secret_key)
    access, secret = (
        (own if own is not None else shared).get_secret_value()
        for own, shared in zip(given, (settings.s3_access_key, settings.s3_secret_key), strict=True)
    )
    return StaticProvider(access, secret) if access else None
