"""Facts of a session file that no session has are refused before any of it is kept."""

from __future__ import annotations

import json

import pytest

from services.common.errors import InvalidRequest
from services.engine.server.conversation_session_file import Facts, Reader, write

FACTS = {"adapter": "toy@1", "requests": 3, "sizes": [2, 3]}


def file_of(**changes: object) -> bytes:
    text = json.dumps(FACTS | changes).encode()
    return b"TEMPERH1" + len(text).to_bytes(4, "little") + text + b"abcde"


def test_a_file_is_read_as_it_was_written() -> None:
    facts = Facts.model_validate(FACTS)
    reader = Reader(write(facts, [[b"ab"], [b"c", b"de"]]))
    assert reader.facts == facts
    assert [b"".join(entry) for entry in reader.entries()] == [b"ab", b"cde"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"requests": wrong} for wrong in (-1, 2**64, 10**30, 1.5, None)),
        *({"sizes": wrong} for wrong in ([], [-5, 10], [0], [10**30], [2**64], [float("inf")], 5)),
        {"adapter": "x" * 600},
        {"more": 1},
    ],
)
def test_facts_that_no_session_has_are_refused(changes: dict[str, object]) -> None:
    """A count that its message cannot hold would be kept, and whoever lists the sessions got an internal error."""
    with pytest.raises(InvalidRequest, match="its facts cannot be read"):
        Reader([file_of(**changes)])
