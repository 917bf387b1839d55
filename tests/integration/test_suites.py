"""Suites of evaluations in a real S3 server: writers at once get numbers of their own, and what is read is what was
written."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common.errors import NotFound
from services.common.evaluation.suites.lines import read_suite
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.evaluation.suites.store import SuiteStore
from services.common.storage.object_store import ObjectStore
from services.common.storage.versioned_objects import PIECE_LINES

EXACT = SuiteSettings.model_validate({"scorer": {"type": "exact"}})


def sums(count: int) -> list[SuiteItem]:
    lines = (json.dumps({"prompt": f"{number} plus 1?", "expected": number + 1}) for number in range(count))
    return read_suite("\n".join(lines), EXACT)


def test_versions_are_written_read_and_removed(store: ObjectStore) -> None:
    suites = SuiteStore(store)
    made = suites.create("sums", EXACT, sums(PIECE_LINES + 1), key_id="ci")
    assert suites.create("sums", EXACT, sums(PIECE_LINES + 1)) == suites.get("sums") == made
    assert suites.items(made) == sums(PIECE_LINES + 1)
    assert suites.items(made, PIECE_LINES, 10) == sums(PIECE_LINES + 1)[PIECE_LINES:]
    suites.delete(made.ref)
    with pytest.raises(NotFound):
        suites.items(made)
    assert suites.newest() == []
    assert suites.create("sums", EXACT, sums(1)).version == 2


def test_writers_at_once_get_numbers_of_their_own(store: ObjectStore) -> None:
    suites = SuiteStore(store)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda count: suites.create("sums", EXACT, sums(count)), range(1, 5)))
    assert sorted(manifest.version for manifest in made) == suites.versions("sums") == [1, 2, 3, 4]
    assert {manifest.items: len(suites.items(manifest)) for manifest in made} == {1: 1, 2: 2, 3: 3, 4: 4}
