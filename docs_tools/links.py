"""Links between pages: files and headings that they lead to."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def broken_links(page: Path) -> list[str]:
    """Targets of a page's links that lead nowhere, with their headings."""
    text = _CODE.sub("", page.read_text())
    return [target for target in _LINK.findall(text) if not _leads_somewhere(page, target)]


def linked(page: Path) -> set[Path]:
    """Files that a page links to."""
    targets = (target.partition("#")[0] for target in _LINK.findall(page.read_text()))
    return {(page.parent / target).resolve() for target in targets if target}


def _leads_somewhere(page: Path, target: str) -> bool:
    name, _, heading = target.partition("#")
    found = (page.parent / name).resolve() if name else page
    return found.exists() and (not heading or found.suffix != ".md" or heading in _anchors(found))


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Anchor of each heading, as GitHub and the site make it; the second of a name ends in -1."""
    found: list[str] = []
    for heading in _HEADING.findall(_FENCED.sub("", page.read_text())):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = sum(other == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", other) is not None for other in found)
        found.append(f"{anchor}-{count}" if count else anchor)
    return frozenset(found)
