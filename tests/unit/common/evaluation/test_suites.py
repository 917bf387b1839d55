"""Suites: malformed lines are named, splits keep groups together, versions never change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from services.common.errors import InvalidRequest, NotFound, Unavailable
from services.common.evaluation.suites.lines import read_suite
from services.common.evaluation.suites.names import SuiteVersion, parse_suite_ref
from services.common.evaluation.suites.spec import SuiteItem, SuiteSampling, SuiteSettings
from services.common.evaluation.suites.split import TrainingSplit, held_out_items
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs.scorers.registry import SCORERS, SuiteScorer
from services.common.storage.versioned_objects import PIECE_LINES
from tests.unit.gateway.fake_stores import MemoryStore

EXACT = SuiteSettings.model_validate({"scorer": {"type": "exact"}})


def jsonl(*rows: Any) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"


def sums(count: int) -> list[SuiteItem]:
    rows = [{"prompt": f"{number} plus 1?", "expected": number + 1} for number in range(count)]
    return read_suite(jsonl(*rows), EXACT)


def test_items_have_their_lines_as_ids_and_answers_as_text() -> None:
    text = jsonl(
        {"prompt": "1+1?", "expected": 2},
        "",
        {"id": "b", "messages": [{"role": "user", "content": "?"}], "expected": ["x", 3]},
    )
    first, second = read_suite("\ufeff" + text, EXACT)
    assert (first.id, first.expected, first.asked) == ("1", ["2"], "1+1?")
    assert (second.id, second.expected, second.weight, second.group) == ("b", ["x", "3"], 1.0, None)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: is not JSON: EOF while parsing an object at column 1"),
        ("[1]", "line 2: must be a JSON object"),
        ({"prompt": "?", "expected": "1", "wieght": 2}, "line 2: unknown field 'wieght': did you mean 'weight'?"),
        ({"prompt": "?", "expected": "1", "weight": 0}, "line 2: weight: Input should be greater than 0"),
        ({"prompt": "?", "expected": []}, "line 2: expected: "),
        ({"prompt": "?", "expected": [True]}, "line 2: expected[0]: "),
        ({"expected": "1"}, "line 2: give one of prompt, messages"),
        ({"messages": [{"role": "user"}], "expected": "1"}, "line 2: messages[0]: the user's turn needs content"),
        ({"prompt": "?"}, "line 2: expected: is missing, and the exact scorer compares with it"),
        ({"prompt": "?", "expected": "1", "id": "1"}, "line 2: id: '1' is that of line 1 as well"),
    ],
)
def test_a_malformed_line_is_named_by_number_and_field(line: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_suite(jsonl({"prompt": "?", "expected": "1"}, line), EXACT)
    assert told in refused.value.message
    assert refused.value.param == "jsonl"


def test_several_malformed_lines_are_told_at_once() -> None:
    with pytest.raises(InvalidRequest, match=r"line 1: .*line 5: .*; 2 more lines are malformed"):
        read_suite(jsonl(*["{"] * 7), EXACT)
    with pytest.raises(InvalidRequest, match="has no lines"):
        read_suite("\n", EXACT)


def test_an_answer_that_the_scorer_cannot_compare_with_is_refused() -> None:
    numeric = SuiteSettings.model_validate({"scorer": {"type": "numeric"}})
    with pytest.raises(InvalidRequest, match="line 1: expected: is 'many': the numeric reward needs a finite number"):
        read_suite(jsonl({"prompt": "?", "expected": ["3", "many"]}), numeric)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"scorer": {"type": "exact", "weight": 2.0}}, "scorer.weight must be 1"),
        ({"scorer": {"type": "exact"}, "sampling": {"samples": 4}}, "all would be the same"),
        ({"scorer": {"type": "exact"}, "sampling": {"score": "pass", "temperature": 1.0}}, "needs several samples"),
        ({"scorer": {"type": "exact"}, "sampling": {"k": 2}}, "k would do nothing"),
        (
            {"scorer": {"type": "exact"}, "sampling": {"score": "pass", "samples": 2, "temperature": 1.0, "k": 3}},
            "k is 3",
        ),
        ({"scorer": {"type": "exact"}, "few_shot": [{"prompt": [], "completion": "a"}]}, "must end with the turn"),
        ({"scorer": {"type": "best"}}, "does not match any of the expected tags"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SuiteSettings.model_validate(settings)


def test_a_split_keeps_groups_together_and_is_the_same_each_time() -> None:
    rows = [{"prompt": f"{n}?", "completion": str(n), "topic": f"t{n // 5}"} for n in range(100)]
    text, split = jsonl(*rows), TrainingSplit(fraction=0.2, seed=3, group_by="topic")
    held = held_out_items(text, split, EXACT)
    assert [item.id for item in held] == [item.id for item in held_out_items(text, split, EXACT)]
    topics = {item.group for item in held}
    assert len(held) == 5 * len(topics) == 20
    other = held_out_items(text, TrainingSplit(fraction=0.2, seed=4, group_by="topic"), EXACT)
    assert {item.group for item in other} != topics
    grown = held_out_items(text + jsonl({"prompt": "x", "completion": "y", "topic": "new"}), split, EXACT)
    assert len(topics & {item.group for item in grown}) >= 3
    line = int(held[0].id.removeprefix("line-"))
    assert (held[0].asked, held[0].expected) == (rows[line - 1]["prompt"], [rows[line - 1]["completion"]])


def test_rows_with_the_same_prompt_are_one_group_and_conversations_end_with_their_answer() -> None:
    chat = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    text = jsonl({"prompt": "a?", "completion": "b"}, chat, {"prompt": "c?", "completion": "d"})
    held = held_out_items(text, TrainingSplit(fraction=0.5), EXACT)
    assert {item.id for item in held} in ({"line-1", "line-2"}, {"line-3"})


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"prompt": "a", "completion": "b"}, {"text": "a"}], "line 2: text: a plain text asks nothing"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], "line 2: give either prompt and completion"),
        (
            [
                {
                    "messages": [
                        {"role": "user", "content": "a"},
                        {"role": "assistant", "content": "b"},
                        {"role": "user", "content": "c"},
                    ]
                }
            ],
            "line 1: messages: must end with the assistant's answer",
        ),
        ([{"prompt": "a", "completion": "b"}] * 3, "split: all rows are of one group"),
    ],
)
def test_rows_without_an_answer_are_named(rows: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        held_out_items(jsonl(*rows), TrainingSplit(), EXACT)


def test_a_row_needs_its_group() -> None:
    with pytest.raises(InvalidRequest, match="line 1: topic: must be the name of the row's group"):
        held_out_items(jsonl({"prompt": "a", "completion": "b"}), TrainingSplit(group_by="topic"), EXACT)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def suites(memory: MemoryStore) -> SuiteStore:
    return SuiteStore(memory)  # type: ignore[arg-type]


def test_a_version_is_what_was_written_and_pages_cross_pieces(suites: SuiteStore) -> None:
    items = sums(PIECE_LINES + 10)
    made = suites.create("sums", EXACT, items, key_id="ci")
    assert (str(made.ref), made.items, made.clusters, len(made.pieces)) == ("sums@1", len(items), len(items), 2)
    assert suites.get("sums") == suites.get("sums", 1) == made
    assert suites.items(made) == items
    assert suites.items(made, PIECE_LINES - 3, 6) == items[PIECE_LINES - 3 : PIECE_LINES + 3]
    assert suites.items(made, len(items), 5) == []
    assert suites.newest() == [made.ref]


def test_the_same_content_is_the_same_version_and_other_content_the_next(suites: SuiteStore) -> None:
    first = suites.create("sums", EXACT, sums(3))
    assert suites.create("sums", EXACT, sums(3)) == first
    second = suites.create("sums", EXACT, sums(4))
    strict = SuiteSettings.model_validate({"scorer": {"type": "exact", "strip": False}})
    third = suites.create("sums", strict, sums(4))
    assert [first.version, second.version, third.version] == suites.versions("sums") == [1, 2, 3]
    assert len({first.digest, second.digest, third.digest}) == 3
    assert suites.newest() == [third.ref]


def test_a_number_never_comes_twice(suites: SuiteStore, memory: MemoryStore) -> None:
    suites.create("sums", EXACT, sums(1))
    suites.delete(suites.create("sums", EXACT, sums(2)).ref)
    assert suites.create("sums", EXACT, sums(2)).version == 3
    assert [key for key in memory.objects if "/00000002/" in key] == ["suites/sums/00000002/claim"]
    with pytest.raises(NotFound, match="sums@2"):
        suites.get("sums", 2)
    with pytest.raises(NotFound, match="'other' does not exist"):
        suites.get("other")


def test_what_broke_off_is_no_version_and_what_was_changed_is_not_read(suites: SuiteStore, memory: MemoryStore) -> None:
    memory.put("suites/sums/00000001/claim", b"")
    memory.put("suites/sums/00000001/items-000000", b"{}")
    made = suites.create("sums", EXACT, sums(2))
    assert made.version == 2
    memory.objects["suites/sums/00000002/items-000000"] += b" "
    with pytest.raises(Unavailable, match="not those that were written"):
        suites.items(made)
    del memory.objects["suites/sums/00000002/items-000000"]
    with pytest.raises(NotFound, match="sums@2"):
        suites.items(made)


def test_items_of_one_group_are_worth_one(suites: SuiteStore) -> None:
    rows = [{"prompt": f"{n}", "expected": "1", "group": f"g{n % 2}"} for n in range(10)] + [
        {"prompt": "x", "expected": "1"}
    ]
    made = suites.create("grouped", EXACT, read_suite(jsonl(*rows), EXACT))
    assert made.clusters == 3
    assert made.effective_items == pytest.approx(11**2 / (25 + 25 + 1))


def test_the_page_names_every_field_and_every_scorer() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/guides/evaluation.md").read_text()
    own = [scorer for scorer in get_args(SuiteScorer) if scorer not in SCORERS]
    fields = {name for model in (SuiteItem, SuiteSettings, SuiteSampling, *own) for name in model.model_fields}
    kinds = {model.model_fields["type"].default for model in get_args(SuiteScorer)}
    named = (fields | kinds) - {"sampling"}
    assert not sorted(name for name in named if not re.search(rf"`(sampling)?\.?{name}`", page))


def test_references() -> None:
    assert parse_suite_ref("sums") == ("sums", None)
    assert parse_suite_ref("sums@12") == ("sums", 12)
    assert str(SuiteVersion("sums", 2)) == "sums@2"
    for bad in ("", "a/b", "..", "sums@", "sums@0", "sums@x", "@1"):
        with pytest.raises(InvalidRequest):
            parse_suite_ref(bad)
