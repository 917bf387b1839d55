"""Fields of what is stored, kind by kind, as tests/fixtures/contracts/documents.txt has them: a change of a format is
made on purpose, under the rules of docs/decisions/schema-versions.md."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.storage.record_versions import FIELD
from tests.contracts import PLACE
from tests.integration.documents import KINDS, Make, World, world

__all__ = ["world"]
LINES = dict(line.split(" ", 1) for line in (PLACE / "documents.txt").read_text().splitlines())


def form(value: Any) -> Any:
    """A value's fields and types, and the number of its schema. Text that is JSON counts as what it says; a list by
    what its entries are."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        value = json.loads(value)
    if isinstance(value, dict):
        return {name: int(member) if name == FIELD else form(member) for name, member in sorted(value.items())}
    if isinstance(value, list):
        return [json.loads(text) for text in sorted({json.dumps(form(entry)) for entry in value})]
    return {str: "text", bool: "flag", int: "number", float: "number", type(None): "null"}[type(value)]


def test_a_form_is_of_fields_and_types() -> None:
    assert form({"b": 1, "a": [1.5, 2, "x"], "c": '{"d": [true, null]}', "schema": "2"}) == {
        "a": ["number", "text"],
        "b": "number",
        "c": {"d": ["flag", "null"]},
        "schema": 2,
    }


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
async def test_a_document_has_the_fields_that_are_written_down(make: Make, world: World) -> None:
    place = (await make(world)).place
    stored = world.raw.hgetall(place) if place.startswith("temper:") else json.loads(world.store.get(place).data)
    line = json.dumps(form(stored), separators=(",", ":"))
    assert LINES.get(make.__name__) == line, (
        "the format of a stored document has changed: see docs/decisions/schema-versions.md, then have in "
        f"tests/fixtures/contracts/documents.txt: {make.__name__} {line}"
    )
