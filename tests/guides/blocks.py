"""Blocks of code in the guides, and what the comments above them say about running them.

A block in a language of RUN is run as it is written, unless the comment above it says why not. A comment is one line,
directly above the block or above another such comment:

    <!-- not run: needs a cluster -->            the block is left out, and why
    <!-- POST /v1/chat/completions -->           where the body of a json block goes
    <!-- answers: Good day! -->                  the block prints this line, or a text in its JSON is exactly this
    <!-- fails: the reason -->                   the block is refused, and says this
    <!-- where JOB is: temper … -->              a command whose output stands in the place of a word that the reader
                                                 replaces by a name of his own
    <!-- setup: temper … -->                     a command before the block, which the reader does not need
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.stack import ROOT

RUN = ("sh", "bash", "python", "json", "http")
"""Languages of blocks that are run, or say why not."""
PLAIN = ("text", "yaml", "toml", "lark", "mermaid")
"""Languages of blocks that nobody runs by themselves: drawings, files, outputs."""

_FENCE = re.compile(r"^\s*```(\S*)\s*$")
_COMMENT = re.compile(r"^\s*<!-- (.*?) -->\s*$")
_METHOD = re.compile(r"(GET|POST|PUT|DELETE) (/\S+)")
_WHERE = re.compile(r"where (\w+) is: (.+)")


class BadPage(ValueError):
    """A page has a block that is neither run nor says why not; the message has the file and the line."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: str
    """Path from the repository's root."""
    line: int
    """Of its fence, from 1."""
    language: str
    code: str
    excuse: str | None = None
    """Why it is not run."""
    method: str = "POST"
    path: str | None = None
    """Where the body of a json block goes."""
    answers: tuple[str, ...] = ()
    fails: str | None = None
    words: dict[str, str] = field(default_factory=dict)
    """A command for each word of the code that the reader replaces."""
    setup: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.excuse is None


def pages() -> list[Path]:
    """Every page whose blocks a reader copies."""
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "charts" / "temper" / "README.md"]
    docs = ROOT / "docs"
    folders = (path for folder in ("guides", "tutorials") for path in sorted((docs / folder).rglob("*.md")))
    return [*named, *sorted(docs.glob("*.md")), *folders]


def read(page: Path) -> list[Block]:
    """The blocks of a page, in order.

    Raises:
        BadPage: one of them can be neither run nor left out.
    """
    return list(parse(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))))


def parse(text: str, name: str) -> Iterator[Block]:
    """The blocks of a page's text; see `read`."""
    lines = text.splitlines()
    comments: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        if comment := _COMMENT.match(line):
            comments.append(comment[1])
        elif fence := _FENCE.match(line):
            end = next((n for n in range(number + 1, len(lines)) if lines[n].strip() == "```"), None)
            if end is None:
                raise BadPage(f"{name}:{number + 1}: the block has no end")
            code = "\n".join(lines[number + 1 : end]) + "\n"
            yield _block(name, number + 1, fence[1], code, comments)
            comments, number = [], end
        else:
            comments = []
        number += 1


def _block(page: str, line: int, language: str, code: str, comments: list[str]) -> Block:
    place = f"{page}:{line}"
    if language not in (*RUN, *PLAIN):
        known = ", ".join((*RUN, *PLAIN))
        raise BadPage(f"{place}: the block's language is {language!r}: write one of {known} behind its fence")
    told: dict[str, list[str]] = {"not run": [], "answers": [], "fails": [], "setup": []}
    words: dict[str, str] = {}
    request = None
    for comment in comments:
        kind, _, value = comment.partition(": ")
        if match := _METHOD.fullmatch(comment):
            request = match
        elif match := _WHERE.fullmatch(comment):
            words[match[1]] = match[2]
        elif kind in told and value:
            told[kind].append(value)
        else:
            raise BadPage(f"{place}: tests/guides/blocks.py knows no comment like <!-- {comment} -->")
    excuse = told["not run"][0] if told["not run"] else None
    if language == "json" and request is None and excuse is None:
        raise BadPage(
            f"{place}: say above the block where the body goes, <!-- POST /v1/… -->, or why it is <!-- not run: … -->"
        )
    for word in words:
        if not re.search(rf"\b{word}\b", code):
            raise BadPage(f"{place}: the block has no word {word}")
    return Block(
        page=page,
        line=line,
        language=language,
        code=code,
        excuse=excuse,
        method=request[1] if request else "POST",
        path=request[2] if request else None,
        answers=tuple(told["answers"]),
        fails=told["fails"][0] if told["fails"] else None,
        words=words,
        setup=tuple(told["setup"]),
    )
