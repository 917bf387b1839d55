"""The table of checks in docs/guides/doctor.md, from the registry of `temper doctor`."""

from __future__ import annotations

from cli.doctor import quick
from cli.doctor.registry import CHECKS
from docs_tools.paths import DOCS

TARGET = DOCS / "guides" / "doctor.md"
_BEGIN, _END = "<!-- checks -->\n", "<!-- /checks -->\n"


def with_checks(page: str) -> str:
    """The page with a current table between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{TARGET} has no {_BEGIN.strip()} and {_END.strip()}")
    first = {check.name for check in quick.FIRST}
    rows = [f"| `{check.name}` | {check.says} | {'yes' if check.name in first else ''} |\n" for check in CHECKS]
    return f"{before}{begin}| check | ok means | before `temper up` |\n|---|---|---|\n{''.join(rows)}{end}{after}"
