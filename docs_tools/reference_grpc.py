"""The reference of the gRPC interface, from the comments of proto/."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from docs_tools.paths import DOCS, ROOT

TARGET = DOCS / "reference" / "grpc.md"
_SOURCES = ROOT / "proto" / "temper" / "v1"
_HEADER = """# gRPC

<!-- Written by `python -m docs_tools.generate` from proto/; change the comments there, not this file. -->

What a gateway says to an engine (`temper.v1`). Clients use the [HTTP API](../guides/http-api.md): this interface has no
API keys, speaks token ids, and changes with a release. Numbers of fields are never used again.
"""
_BLOCK = re.compile(r"^(service|message|enum) (\w+) \{(\})?$")
_RPC = re.compile(r"^rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)")
_FIELD = re.compile(r"^(repeated |optional )?(map<[^>]+>|[\w.]+) (\w+) = (\d+)")
_VALUE = re.compile(r"^(\w+) = (\d+)")


@dataclass(slots=True)
class _Item:
    kind: str
    name: str
    comment: str
    rows: list[tuple[str, ...]] = field(default_factory=list)


def render() -> str:
    """The whole page."""
    parts = [_HEADER]
    for source in sorted(_SOURCES.glob("*.proto")):
        parts.append(f"\n## {source.name}\n")
        parts += [_section(item) for item in _items(source.read_text())]
    return "".join(parts)


def _items(text: str) -> list[_Item]:
    found: list[_Item] = []
    open_items: list[_Item | None] = []
    comment: list[str] = []
    for line in (line.strip() for line in _joined(text).splitlines()):
        if line.startswith("//"):
            comment.append(line[2:].strip())
            continue
        said, comment = " ".join(comment), []
        if block := _BLOCK.match(line):
            outer = next((item.name for item in reversed(open_items) if item is not None), "")
            item = _Item(block[1], f"{outer}.{block[2]}" if outer else block[2], said)
            found.append(item)
            if not block[3]:
                open_items.append(item)
        elif line.endswith("{"):
            open_items.append(None)  # oneof: its fields are the message's
        elif line.startswith("}"):
            open_items.pop()
        elif open_items:
            _add(next(item for item in reversed(open_items) if item is not None), line, said)
    return found


def _joined(text: str) -> str:
    """Source with each declaration on one line; comments stay where they are."""
    lines: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        before = lines[-1] if lines else ""
        if (
            before
            and not before.endswith((";", "{", "}"))
            and not before.startswith("//")
            and not bare.startswith("//")
        ):
            lines[-1] = f"{before} {bare}"
        else:
            lines.append(bare)
    return "\n".join(lines)


def _add(item: _Item, line: str, said: str) -> None:
    if match := _RPC.match(line):
        given, told = (f"{match[2] or ''}{match[3]}", f"{match[4] or ''}{match[5]}")
        item.rows.append((f"`{match[1]}`", f"`{given}`", f"`{told}`", said))
    elif item.kind == "enum" and (match := _VALUE.match(line)):
        item.rows.append((match[2], f"`{match[1]}`", said))
    elif match := _FIELD.match(line):
        item.rows.append((match[4], f"`{match[3]}`", f"{match[1] or ''}{match[2]}", said))


def _section(item: _Item) -> str:
    heads = {
        "service": ("call", "request", "answer", ""),
        "message": ("no.", "field", "type", ""),
        "enum": ("no.", "value", ""),
    }[item.kind]
    text = f"\n### {item.name}\n" + (f"\n{item.comment}\n" if item.comment else "")
    if not item.rows:
        return text
    table = [heads, ("---",) * len(heads), *item.rows]
    return text + "\n" + "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in table)
