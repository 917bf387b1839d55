"""GET /ui/: the dashboard's page and its files.

The files are read once, when the application is made. Their address has a digest of all of them, so that a browser
keeps them for good and never mixes two releases; the page itself is asked for anew each time.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from services.common.errors import NotFound
from services.gateway.api.base.routing import Routes
from services.gateway.auth.route_permissions import PUBLIC

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_PAGE = "index.html"
_MARK = b"__DIGEST__"
"""Placeholder of the digest in the page's links."""
_ALWAYS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of every file: no scripts or styles but the files here, and no frames of other sites."""
_FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is sent."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> StaticFile:
        """File of this name; its ending decides the content type.

        Raises:
            ValueError: the ending is none that a browser would be sent.
        """
        ending = name.rpartition(".")[2]
        if ending not in _TYPES:
            raise ValueError(f"{name}: the dashboard has no files of this kind, only {', '.join(_TYPES)}")
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, gzip.compress(content, 9, mtime=0), _TYPES[ending], etag)

    def answer(self, request: Request, cache_control: str) -> Response:
        """Answer to a request for the file: 304 if the client has it, compressed if it reads that."""
        headers = {**_ALWAYS, "cache-control": cache_control, "etag": self.etag, "vary": "accept-encoding"}
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(self.compressed, media_type=self.media_type, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


class StaticFiles:
    """All files of the dashboard, in memory."""

    def __init__(self) -> None:
        found = dict(_walk(files(__package__).joinpath("static")))
        page = found.pop(_PAGE)
        digest = hashlib.sha256()
        for name, content in sorted(found.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.digest = digest.hexdigest()[:16]
        self.page = StaticFile.of(_PAGE, page.replace(_MARK, self.digest.encode()))
        self.assets = {name: StaticFile.of(name, content) for name, content in found.items()}

    @property
    def compressed_bytes(self) -> int:
        """Bytes that a browser loads at most."""
        return sum(len(file.compressed) for file in (self.page, *self.assets.values()))


def _walk(place: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in place.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry.read_bytes()


def dashboard_routes() -> Routes:
    """Routes of the dashboard; they are not part of the API's description."""
    routes = Routes("dashboard")
    static = StaticFiles()

    @routes.get("/ui", PUBLIC, include_in_schema=False)
    async def to_page() -> Response:
        return RedirectResponse("ui/", 308, headers=_ALWAYS)

    @routes.get("/ui/", PUBLIC, include_in_schema=False)
    async def page(request: Request) -> Response:
        return static.page.answer(request, "no-cache")

    @routes.get("/ui/assets/{digest}/{name:path}", PUBLIC, include_in_schema=False)
    async def asset(request: Request, digest: str, name: str) -> Response:
        file = static.assets.get(name) if digest == static.digest else None
        if file is None:
            raise NotFound("the dashboard has no such file; a newer release may have replaced it: load /ui/ again")
        return file.answer(request, _FOREVER)

    return routes
