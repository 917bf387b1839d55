"""The page that shows the API: whole without any other server."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import httpx


def test_everything_that_the_page_loads_is_here(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text) + re.findall(r"url: '([^']+)'", page.text)
    assert len(loaded) == 4
    for url in loaded:
        assert "//" not in url, "nothing of another server"
        answer = http.get(urljoin("/docs", url))
        assert answer.status_code == 200, url
        assert len(answer.content) > 500, url


def test_there_are_no_other_files(http: httpx.Client) -> None:
    for path in ("/docs/swagger-ui-bundle.js.map", "/docs/__init__.py", "/docs/..%2fmain.py", "/docs/oauth2-redirect"):
        assert http.get(path).status_code in (400, 404), path
