"""Schema numbers: missing means 1, what is newer is refused by name."""

from __future__ import annotations

import pytest

from services.common.errors import NewerSchema
from services.common.storage.record_versions import Schema

THINGS = Schema("things", 2)


@pytest.mark.parametrize("found", [None, "", 1, "1", 2, "2"])
def test_what_this_release_knows(found: object) -> None:
    THINGS.check(found, "thing 7")


@pytest.mark.parametrize("found", [3, "3", 0, -1, "two", 1.5, [2]])
def test_what_it_does_not_know(found: object) -> None:
    with pytest.raises(NewerSchema, match=r"^thing 7 has schema .* of things, .* up to 2: .*upgrade"):
        THINGS.check(found, "thing 7")


def test_the_number_goes_with_the_record_and_not_into_it() -> None:
    stamped = THINGS.stamped({"schema": 9, "size": 3})
    assert stamped == {"schema": 2, "size": 3}
    assert THINGS.unstamped(stamped, "thing 7") == {"size": 3}
