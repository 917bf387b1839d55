"""Hooks of mkdocs for this repository: pages from beside docs/, and a page of the API to try.

- README, CONTRIBUTING, CHANGELOG and the pages of benchmarks and chart become pages of the site.
- Folders of `nav` that end in a slash are filled with their pages.
- Links to files that are no page, sources for example, become plain text: the site has no copy of them.
- A link that leads nowhere is a warning, with which `mkdocs build --strict` fails.
"""

from __future__ import annotations

import logging
import posixpath
import re
from importlib.resources import files as resources
from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html

from docs_tools import reference_http
from docs_tools.paths import DOCS, ROOT

_log = logging.getLogger("mkdocs.hooks.site")
_ADDED = {
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "charts/temper/README.md": "chart.md",
    "README.md": "temper.md",
}
"""File of the repository → page of the site."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|mailto:|#)([^)\s]+)\)")
_FENCES = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")
_TRY = "reference/try"


def on_config(config: Any) -> Any:
    """Fills the folders of `nav`."""
    config["nav"] = _filled(config["nav"])
    return config


def _filled(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_filled(one) for one in entry]
    if isinstance(entry, dict):
        return {title: _filled(inside) for title, inside in entry.items()}
    if isinstance(entry, str) and entry.endswith("/"):
        pages = sorted(path.name for path in (DOCS / entry).glob("*.md") if path.name != "README.md")
        return [f"{entry}README.md", *(f"{entry}{name}" for name in pages)]
    return entry


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from beside docs/ and Swagger UI over the OpenAPI document."""
    from mkdocs.structure.files import File, InclusionLevel

    for source, page in _ADDED.items():
        text = (ROOT / source).read_text()
        level = InclusionLevel.INCLUDED if page in _named(config["nav"]) else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, page, content=_relinked(text, source, page), inclusion=level))
    for image in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{image.name}", abs_src_path=str(image)))
    swagger = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Temper API",
        swagger_js_url=_SWAGGER[0],
        swagger_css_url=_SWAGGER[1],
        swagger_favicon_url=_SWAGGER[2],
    )
    files.append(File.generated(config, f"{_TRY}/index.html", content=bytes(swagger.body)))
    files.append(File.generated(config, f"{_TRY}/openapi.json", content=reference_http.openapi_json()))
    for part in _SWAGGER:
        content = resources("fastapi_swagger").joinpath("resources", part).read_bytes()
        files.append(File.generated(config, f"{_TRY}/{part}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Mends the links of a page that lead out of docs/."""
    source = page.file.src_uri
    if source in _ADDED.values():
        return markdown
    text = _relinked(markdown, f"docs/{source}", source)
    return f"{text}\n[Try it](try/index.html){{ .md-button }}\n" if source == "reference/http.md" else text


def _named(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    inside = nav.values() if isinstance(nav, dict) else nav
    return set().union(*(_named(one) for one in inside))


def _relinked(text: str, source: str, page: str) -> str:
    """The text of a repository's file with links as they lead from a page of the site."""

    def mended(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        name, hash_, heading = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        if not (ROOT / path).exists():
            _log.warning("%s links to %s, which does not exist", source, target)
            return match[0]
        if path in _ADDED:
            found = _ADDED[path]
        elif path.startswith("docs/") and (ROOT / path).is_file():
            found = path.removeprefix("docs/")
        elif image:
            found = path.removeprefix("benchmarks/")
        else:
            return words
        relative = posixpath.relpath(found, posixpath.dirname(page) or ".")
        return f"{image}[{words}]({relative}{hash_}{heading})"

    parts = _FENCES.split(text)
    return "".join(part if number % 2 else _LINK.sub(mended, part) for number, part in enumerate(parts))
