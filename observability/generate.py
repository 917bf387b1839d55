"""Writes dashboards, rules and what the guides say of them: `python -m observability.generate [--check]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from observability import pages
from observability.alerts import GROUPS
from observability.boards import BOARDS
from observability.render import render

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "temper"


def files() -> Mapping[Path, str]:
    """Everything that is written."""
    found = {CHART / "dashboards" / f"{board.name}.json": render(board) for board in BOARDS}
    found |= {CHART / "rules" / f"{group.name}.yaml": group.render() for group in GROUPS}
    guides = ROOT / "docs" / "guides"
    found[guides / "metrics.md"] = pages.metrics()
    monitoring = guides / "monitoring.md"
    found[monitoring] = pages.with_tables(monitoring.read_text())
    return found


def strangers(wanted: Mapping[Path, str]) -> list[Path]:
    """Files in the chart's two folders that nothing here writes: of a dashboard or a group that is no more."""
    there = [*(CHART / "dashboards").glob("*"), *(CHART / "rules").glob("*")]
    return sorted(path for path in there if path not in wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is not current")
    check = parser.parse_args().check
    wanted = files()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    extra = strangers(wanted)
    if check:
        for path in [*stale, *extra]:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not current: run `python -m observability.generate`\n")
        return 1 if stale or extra else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    for path in extra:
        path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
