"""What others rely on changes on purpose only (tests/contracts.py says how)."""

from __future__ import annotations

import pytest

from tests.contracts import PLACE, SURFACES, changes


@pytest.mark.parametrize("surface", SURFACES)
def test_nothing_that_others_rely_on_has_changed(surface: str) -> None:
    assert changes(surface) == [], "on purpose? python -m tests.contracts --write, and a line in CHANGELOG.md"


def test_schemas_are_not_named_after_modules() -> None:
    """Two models of one name would be: a name that changes whenever a file moves, and so do generated clients."""
    names = [line.split()[1] for line in (PLACE / "http.txt").read_text().splitlines() if line.startswith("schema ")]
    assert len(names) > 100
    assert [name for name in names if "__" in name] == []
