"""Tables of what was tried, on the pages of agent and doctor, have what the tests try."""

from __future__ import annotations

import re
from collections import defaultdict

from docs_tools.paths import DOCS
from tests.integration.doctor_faults import FAULTS
from tests.unit.common.security.escapes.attempts import ATTEMPTS
from tests.unit.common.security.escapes.field import HOGS


def test_every_attempt_to_leave_the_sandbox_is_told() -> None:
    page = (DOCS / "guides" / "agent.md").read_text()
    rows = re.findall(r"^\| [^|]+ \((\d+)\) \| ([^|]+) \| 0 \| 0 \|$", page, re.MULTILINE)
    assert rows, "the table is there"
    told = [text.split("; ") for _, text in rows]
    assert [int(count) for count, _ in rows] == [len(row) for row in told]
    names = [name for row in told for name in row]
    assert sorted(names) == sorted([*(attempt.name for attempt in ATTEMPTS), *HOGS])


def test_every_planted_fault_is_told() -> None:
    page = (DOCS / "guides" / "doctor.md").read_text()
    planted, words = defaultdict(list), defaultdict(list)
    for name, (check, said, _) in FAULTS.items():
        planted[check].append(name.replace("_", " "))
        words[check].append(f"“{said.strip()}”")
    rows = [f"| `{check}` | {'; '.join(planted[check])} | {'; '.join(words[check])} |" for check in planted]
    assert [row for row in rows if row not in page.splitlines()] == [], "these rows are missing"
    assert f"plants {len(FAULTS)} faults" in page
