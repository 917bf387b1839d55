"""Checkpoint source: a repository of the Hugging Face hub, by its HTTP API (https://huggingface.co/docs/hub/api).

The huggingface_hub package does not check checksums, loses unfinished chunks and sends the token to other hosts
(measured in docs/decisions/own-code.md); we need three kinds of GET request. A redirect to the storage of large files
never carries the token: urllib3 drops Authorization when the host changes
(`Retry.DEFAULT_REMOVE_HEADERS_ON_REDIRECT`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import quote, urljoin, urlsplit

import urllib3

from services.common.security.outbound import pool
from services.model_source.errors import SourceBroken, SourceRejected, broken, one_line
from services.model_source.files import RemoteFile, is_wanted
from services.model_source.settings import ModelSourceSettings
from services.model_source.streams import blocks

_CONNECT_SECONDS = 5.0
_REDIRECTS = 5
_PAGES = 100
_HEX = re.compile("[0-9a-f]{40,64}")


class HubSource:
    """Source that lists and opens the files at the top of a repository, at one commit.

    The commit is the one that ``revision`` names when the list is first asked for.
    """

    def __init__(self, settings: ModelSourceSettings, repository: str, revision: str) -> None:
        self._endpoint, self._repository, self._revision = settings.hf_endpoint, repository, revision
        self._commit: str | None = None
        token = settings.hf_token.get_secret_value()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._headers |= {"User-Agent": "temper", "Accept-Encoding": "identity"}
        self._has_token = bool(token)
        self._pool = pool(
            settings,
            settings.hf_endpoint,
            maxsize=settings.model_connections,
            timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=settings.model_timeout_seconds),
        )

    def __str__(self) -> str:
        return f"hf://{self._repository}@{self._revision} on {self._endpoint}"

    def files(self) -> list[RemoteFile]:
        revision = quote(self._revision, safe="")
        commit = self._json(f"{self._endpoint}/api/models/{self._repository}/revision/{revision}")[0].get("sha")
        if not isinstance(commit, str) or not _HEX.fullmatch(commit):
            raise SourceBroken(f"{self} has no commit id: is TEMPER_HF_ENDPOINT a hub?")
        self._commit = commit
        files: list[RemoteFile] = []
        url: str | None = f"{self._endpoint}/api/models/{self._repository}/tree/{commit}"
        for _ in range(_PAGES):
            if url is None:
                return files
            entries, following = self._json(url)
            files += [file for entry in entries if (file := _file(entry)) is not None]
            # The next page is on the same host, or the token would go astray.
            url = urljoin(url, following) if following else None
            if url is not None and urlsplit(url)[:2] != urlsplit(self._endpoint)[:2]:
                raise SourceRejected("TEMPER_HF_ENDPOINT", f"{self} continues its list on another host: {url}")
        raise SourceRejected("TEMPER_MODEL_SOURCE", f"{self} has more than {_PAGES} pages of files")

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        ranged = {"Range": f"bytes={offset}-"} if offset else {}
        url = f"{self._endpoint}/{self._repository}/resolve/{self._commit}/{quote(file.name)}"
        response = self._get(url, ranged)
        try:
            yield (offset if response.status == 206 else 0), blocks(response)
        finally:
            response.close()
            response.release_conn()

    def _json(self, url: str) -> tuple[Any, str | None]:
        response = self._get(url, {})
        try:
            link = re.search(r'<([^>]+)>;\s*rel="next"', response.headers.get("Link", ""))
            return json.loads(response.read()), (link[1] if link else None)
        except ValueError as error:
            raise SourceBroken(f"{self} does not answer in JSON: is TEMPER_HF_ENDPOINT a hub?") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise broken(error) from error
        finally:
            response.release_conn()

    def _get(self, url: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        try:
            response = self._pool.request(
                "GET",
                url,
                headers=self._headers | headers,
                preload_content=False,
                retries=urllib3.Retry(
                    total=_REDIRECTS, connect=0, read=0, status=0, redirect=_REDIRECTS, raise_on_status=False
                ),
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise SourceBroken(f"{self} is away: {one_line([error])}") from error
        if response.status in (200, 206):
            return response
        status = response.status
        response.close()
        raise self._refusal(status)

    def _refusal(self, status: int) -> SourceRejected | SourceBroken:
        if status in (401, 403):
            # The hub answers 401 for what does not exist as well, so that nobody learns which names do.
            token = "is not allowed to read it" if self._has_token else "is not set"
            return SourceRejected(
                "TEMPER_MODEL_SOURCE",
                f"{self} answers {status}: no such repository, or one that needs a token, and TEMPER_HF_TOKEN {token}",
            )
        if status == 404:
            return SourceRejected("TEMPER_MODEL_SOURCE", f"{self} answers 404: no such repository, revision or file")
        return SourceBroken(f"{self} answers {status}")


def _file(entry: Any) -> RemoteFile | None:
    """File of one entry in the hub's list; None if it is no part of a checkpoint."""
    if not isinstance(entry, dict) or entry.get("type") != "file":
        return None
    name, size, oid, lfs = (entry.get(key) for key in ("path", "size", "oid", "lfs"))
    if not isinstance(name, str) or not is_wanted(name):
        return None
    checksum: tuple[Literal["sha256", "git-sha1"], str] = ("git-sha1", str(oid))
    if isinstance(lfs, dict):
        size, checksum = lfs.get("size", size), ("sha256", str(lfs.get("oid")).removeprefix("sha256:"))
    if not isinstance(size, int) or not _HEX.fullmatch(checksum[1]):
        raise SourceBroken(f"the hub says neither size nor checksum of {name}")
    return RemoteFile(name, size, checksum[1], checksum)
