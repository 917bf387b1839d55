"""Files of the dashboard: what is vendored, what they weigh, how they are sent, and that they lead nowhere else."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from pathlib import Path

import httpx
import pytest

from services.gateway.ui import routes
from services.gateway.ui.routes import StaticFile, StaticFiles
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter

STATIC = Path(routes.__file__).parent / "static"
OURS = sorted(path for path in STATIC.rglob("*.js") if path.parent.name != "vendor")
IMPORT = re.compile(r"""(?:from\s+|import\()\s*["']([^"']+)["']""")


def test_vendored_files_are_those_that_were_released() -> None:
    vendor = STATIC / "vendor"
    manifest = json.loads((vendor / "manifest.json").read_text())
    known = {"manifest.json"}
    for package in manifest["packages"]:
        assert package["version"]
        assert package["licence"]
        assert (vendor / package["licence_file"]).stat().st_size > 500
        known.add(package["licence_file"])
        for name, file in package["files"].items():
            assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == file["sha256"], name
            known.add(name)
    assert {path.name for path in vendor.iterdir()} == known


def test_a_browser_loads_less_than_300_kb() -> None:
    assert 20_000 < StaticFiles().compressed_bytes < 300_000


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(STATIC)))
def test_a_module_imports_files_that_are_here(path: Path) -> None:
    text = path.read_text()
    for target in IMPORT.findall(text):
        assert target.startswith("."), f"{target} is asked of nobody: paths are relative"
        assert (path.parent / target).resolve().is_relative_to(STATIC)
        assert (path.parent / target).exists(), target
    assert not re.search(r"innerHTML|dangerouslySetInnerHTML|\beval\(|new Function|document\.write", text)
    assert "https://" not in text.replace("https://registry", ""), "nothing of another server"
    assert "http://" not in text
    assert len(text.splitlines()) < 300, "a module can be read at once"


def test_every_function_that_is_exported_is_used() -> None:
    texts = {path: path.read_text() for path in OURS}
    for path, text in texts.items():
        for name in re.findall(r"export (?:async )?(?:function\*?|const|class) (\w+)", text):
            others = [other for where, other in texts.items() if where != path]
            used = (
                any(re.search(rf"\b{name}\b", other) for other in others) or len(re.findall(rf"\b{name}\b", text)) > 1
            )
            assert used, f"{name} of {path.name}"


def test_the_page_has_no_script_or_style_of_its_own(http: httpx.Client) -> None:
    page = http.get("/ui/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page.text)
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) > 4
    for link in links:
        answer = http.get(posixpath.join("/ui", link))
        assert answer.status_code == 200, link
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[link.rpartition(".")[2]]
        assert answer.headers["content-type"].startswith(kind)


def test_headers_of_every_file(http: httpx.Client) -> None:
    digest = StaticFiles().digest
    for path in ("/ui/", f"/ui/assets/{digest}/app.js", f"/ui/assets/{digest}/vendor/uplot.css"):
        headers = http.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_known_file_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/ui/")
    assert first.headers["cache-control"] == "no-cache"
    again = http.get("/ui/", headers={"if-none-match": f'W/{first.headers["etag"]}, "x"'})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/ui/", headers={"if-none-match": '"x"'}).status_code == 200


def test_files_are_compressed_for_who_reads_that(http: httpx.Client) -> None:
    path = f"/ui/assets/{StaticFiles().digest}/app.js"
    compressed = http.get(path, headers={"accept-encoding": "gzip"})
    plain = http.get(path, headers={"accept-encoding": "identity"})
    assert compressed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert compressed.content == plain.content == (STATIC / "app.js").read_bytes()
    assert int(compressed.headers["content-length"]) < int(plain.headers["content-length"])


def test_there_are_no_other_files(http: httpx.Client) -> None:
    digest = StaticFiles().digest
    for path in ("index.html", "nothing.js", "../routes.py", "%2e%2e/routes.py", "pages", ""):
        assert http.get(f"/ui/assets/{digest}/{path}").status_code == 404, path
    assert http.get("/ui/assets/of-an-older-release/app.js").status_code == 404
    assert http.get("/ui", follow_redirects=False).headers["location"] == "ui/"


def test_files_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logo\.exe: the dashboard has no files of this kind"):
        StaticFile.of("logo.exe", b"")


def test_a_setting_removes_it(start: Starter) -> None:
    running: Running = start(ui=False)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as client:
        assert client.get("/ui").status_code == client.get("/ui/").status_code == 404
        assert client.get(f"/ui/assets/{StaticFiles().digest}/app.js").status_code == 404
        assert client.get("/v1/status").status_code == 200
