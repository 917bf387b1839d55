"""Writes the table of values in charts/temper/README.md: `python -m tests.chart.values_docs [--check]`.

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


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    page = TARGET.read_text()
    if parser.parse_args().check:
        if page != render(page):
            sys.stderr.write("the chart's README is not current: run `python -m tests.chart.values_docs`\n")
            return 1
        return 0
    TARGET.write_text(render(page))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
