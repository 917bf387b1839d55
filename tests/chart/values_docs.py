"""Writes the table of values in charts/temper/README.md and the descriptions in values.schema.json:
`python -m tests.chart.values_docs [--check]`.

Descriptions are the `# -- ` comments of values.yaml, which stand above their value.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.chart.render import CHART

TARGET = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"
_BEGIN, _END = "<!-- values -->\n", "<!-- /values -->\n"
_KEY = re.compile(r"^( *)([A-Za-z0-9]+):")
_COMMENT = re.compile(r"^ *# -- (.*)$")


def descriptions() -> dict[str, str]:
    """Path → comment."""
    found: dict[str, str] = {}
    path: list[str] = []
    waiting = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        if comment := _COMMENT.match(line):
            waiting = comment[1]
        elif key := _KEY.match(line):
            path = [*path[: len(key[1]) // 2], key[2]]
            if waiting:
                found[".".join(path)] = waiting
            waiting = ""
    return found


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every value that has none below it, or is a map of the user's own."""
    for key, value in tree.items():
        here = (*path, key)
        if isinstance(value, dict) and value and key not in ("requests", "limits", "annotations", "dashboardLabels"):
            yield from leaves(value, here)
        else:
            yield ".".join(here), value


def table() -> str:
    """Of all values."""
    known = descriptions()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = ["| value | default | |", "|---|---|---|"]
    for path, value in leaves(values):
        shown = json.dumps(value, ensure_ascii=False) if value not in ("", None) else ""
        parts = path.split(".")
        above = [known[".".join(parts[:n])] for n in range(1, len(parts)) if ".".join(parts[:n]) in known]
        text = known.get(path, "") or (above[-1] if above and path.endswith(".enabled") else "")
        lines.append(f"| `{path}` | {f'`{shown}`' if shown else ''} | {text} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def render(page: str) -> str:
    """The page with the table as it should be now."""
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}{table()}{_END}{rest.partition(_END)[2]}"


def described(text: str) -> str:
    """The schema, in which each value has the description that it should have now."""
    schema = json.loads(text)
    _describe(schema, "", descriptions())
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _describe(schema: dict[str, Any], path: str, known: Mapping[str, str]) -> None:
    for key, below in schema.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        # Beside a reference nothing counts (draft 7), and what is referred to belongs to several.
        if "$ref" not in below:
            said = {"description": known[here]} if here in known else {}
            rest = {name: value for name, value in below.items() if name != "description"}
            schema["properties"][key] = below = {**said, **rest}
        _describe(below, here, known)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    check = parser.parse_args().check
    current = True
    for file, written in ((TARGET, render), (SCHEMA, described)):
        text = file.read_text()
        current &= text == written(text)
        if not check:
            file.write_text(written(text))
    if check and not current:
        sys.stderr.write("the chart's README or schema is not current: run `python -m tests.chart.values_docs`\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
