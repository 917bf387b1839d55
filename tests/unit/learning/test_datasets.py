"""Rows of data sets, from drawn feedback and logged requests, and the examples that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.evaluation.contamination.hashes import TextHasher, prompt_hashes
from services.common.evaluation.contamination.overlap import ItemOverlap, SuiteOverlap
from services.common.evaluation.contamination.texts import training_texts
from services.common.evaluation.suites.spec import SuiteItem
from services.common.jobs import JOBS
from services.common.storage.ids import key_of
from services.learning.datasets.build import Built, DatasetBuilder, split_of
from services.learning.datasets.convert import examples_of
from services.learning.datasets.outliers import outliers_of, z_scores
from services.learning.datasets.rows import Row, row_of_file
from services.learning.datasets.spec import SPLITS, DatasetSpec, DatasetSplit
from services.learning.datasets.store import DatasetStore, NewDataset
from services.learning.feedback.record import FeedbackRecord
from services.learning.request_log.index import user_mark
from tests.unit.gateway.fake_stores import MemoryStore
from tests.unit.learning.logged import ListedLog, build, request, said


def test_feedback_finds_its_answer() -> None:
    requests = [request(1, "a"), request(2, "b", "c"), request(3, "d", also=("resp_3",)), request(4, "e", session="s")]
    built = build(
        {},
        requests,
        said(1, thumb="up", user="ann"),
        said(5, completion_id="chatcmpl-1", score=-0.5, user="bob"),
        said(2, completion_id="chatcmpl-2:1", thumb="down", label="rude"),
        said(3, completion_id="resp_3", score=0.25),
        said(4, session_id="s", thumb="up"),
        said(6, completion_id="chatcmpl-unknown", thumb="up"),
    )
    rows = built.rows["train"]
    assert [(row.answer_id, row.rating) for row in rows] == [
        ("chatcmpl-1", 0.25),
        ("chatcmpl-2:1", -1.0),
        ("chatcmpl-3", 0.25),
        ("chatcmpl-4", 1.0),
    ]
    assert (rows[0].said_by, rows[0].opinions, rows[1].labels) == (("ann", "bob"), 2, ("rude",))
    report = built.report
    assert (report.opinions, report.requests, report.without_request, report.users) == (6, 4, 1, 2)
    assert set(built.opinions) == {"fb_1", "fb_5", "fb_2", "fb_3", "fb_4"}


def test_what_several_adapters_together_answered_is_an_answer_of_none_of_them() -> None:
    requests = [request(number, "a", answered_by=by) for number, by in enumerate(("toy@1", "toy@1+x@2", "toy@1*0.5"))]
    opinions = [said(number, score=1.0) for number in range(3)]
    for wanted, kept in (("toy", [0]), ("toy@1+x@2", [1]), ("toy@1*0.5", [2]), ("x", [])):
        built = build({"filter": {"versions": [wanted]}}, requests, *opinions)
        assert [row.answer_id for row in built.rows["train"]] == [f"chatcmpl-{number}" for number in kept]


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ({"since": 2.0}, [2, 3]),
        ({"until": 3.0}, [1, 2]),
        ({"versions": ["toy"]}, [1, 2, 3]),
        ({"versions": ["toy@2"]}, []),
        ({"labels": ["good"]}, [1]),
        ({"sources": ["judge"]}, [2]),
        ({"metadata": {"page": "help"}}, [3]),
        ({"min_rating": 0.5}, [1]),
        ({"max_rating": 0.0}, [3]),
        ({"keys": ["other"]}, []),
    ],
)
def test_filters(wanted: dict[str, Any], kept: list[int]) -> None:
    requests = [request(1, "a"), request(2, "b"), request(3, "c", metadata={"page": "help", "x": "y"})]
    built = build(
        {"filter": wanted},
        requests,
        said(1, score=1.0, label="good"),
        said(2, score=0.25, source="judge"),
        said(3, score=-1.0),
    )
    assert [row.answer_id for row in built.rows["train"]] == [f"chatcmpl-{number}" for number in kept]


def test_another_keys_requests_are_not_used() -> None:
    requests = [request(1, "a", owner="k-1"), request(2, "b", owner="k-2")]
    log = ListedLog(requests)
    spec = DatasetSpec.model_validate({"logged": True})
    opinions = [said(number, thumb="up") for number in (1, 2)]
    mine = [one.model_copy(update={"owner": "k-1"}) for one in opinions]
    built = DatasetBuilder(spec, log, "k-1").build(mine, {})
    assert [row.answer_id for rows in built.rows.values() for row in rows] == ["chatcmpl-1"]
    assert built.report.without_request == 1


def test_what_was_logged_only_is_taken_once() -> None:
    requests = [request(1, "a"), request(2, "b", "b"), request(3, "c", kind="text"), request(4, "d", messages=None)]
    built = build({"logged": True}, requests, said(1, thumb="up"))
    assert [(row.answer_id, row.source) for row in built.rows["train"]] == [
        ("chatcmpl-1", "feedback"),
        ("chatcmpl-2:0", "logged"),
    ]
    assert (built.report.duplicates, built.report.without_text) == (1, 2)
    assert build({"logged": True, "filter": {"min_rating": -1}}, requests).rows["train"] == []


def test_equal_answers_are_one_row() -> None:
    requests = [request(number, "same", asks="same") for number in range(1, 4)]
    built = build({}, requests, said(1, thumb="up", user="a"), said(2, thumb="up", user="b"), said(3, thumb="down"))
    (row,) = built.rows["train"]
    assert (row.answer_id, row.opinions, row.said_by) == ("chatcmpl-1", 3, ("a", "b"))
    assert row.rating == pytest.approx(1 / 3)
    assert built.report.duplicates == 2


def test_one_user_has_its_share() -> None:
    requests = [request(number, f"answer {number}") for number in range(1, 21)]
    opinions = [said(number, thumb="up", user="loud" if number <= 15 else f"u-{number}") for number in range(1, 21)]
    built = build({"max_user_share": 0.25}, requests, *opinions)
    loud = [row.at for row in built.rows["train"] if row.said_by == ("loud",)]
    assert loud == [11.0, 12.0, 13.0, 14.0, 15.0], "the newest of them"
    assert (built.report.capped, len(built.rows["train"]), built.report.top_users[0].rows) == (10, 10, 5)
    assert len(build({"max_rows": 3}, requests, *opinions).rows["train"]) == 3


def rated_by(ratings: Mapping[str, Sequence[float]]) -> list[FeedbackRecord]:
    """Opinions of users on the same answers."""
    return [
        said(1000 * place + number, completion_id=f"chatcmpl-{number}", score=rating, user=user)
        for place, (user, of) in enumerate(ratings.items())
        for number, rating in enumerate(of)
    ]


def test_users_unlike_the_rest_are_told() -> None:
    goodness = [1.0, 0.5, -0.5, -1.0, 1.0, 0.0]
    usual = {f"u-{number}": [max(-1.0, min(1.0, one + 0.02 * number)) for one in goodness] for number in range(9)}
    everybody = {**usual, "troll": [-one for one in goodness], "gloomy": [-1.0] * 6, "new": [-1.0] * 4}
    found = {one.user: one for one in outliers_of(rated_by(everybody))}
    names = {key_of(user)[:12]: user for user in everybody}
    assert {names[user] for user in found} == {"troll", "gloomy"}, "four opinions of one user are too few"
    by_name = {names[user]: one for user, one in found.items()}
    assert (by_name["gloomy"].score, by_name["gloomy"].opinions) == (-1.0, 6)
    assert by_name["gloomy"].score_z < -3.5
    assert (by_name["troll"].agreement or 1) < 0.6
    assert (by_name["troll"].agreement_z or 0) < -3.5
    assert outliers_of(rated_by(usual)) == ()
    assert outliers_of(rated_by({name: everybody[name] for name in ("u-1", "troll", "gloomy", "u-2")})) == ()
    same = {f"u-{number}": [1.0] * 5 for number in range(9)}
    assert outliers_of(rated_by(same)) == (), "all are alike"
    (odd,) = outliers_of(rated_by({**same, "troll": [-1.0] * 5}))
    assert names[odd.user] == "troll", "also where all the others are equal"


def test_z_scores_are_those_of_the_book() -> None:
    """Median 3, median absolute deviation 1: 0.6745 (10 - 3) / 1."""
    values = dict(zip("abcdefg", (1.0, 2.0, 3.0, 3.0, 4.0, 4.0, 10.0), strict=True))
    assert z_scores(values)["g"] == pytest.approx(0.6745 * 7, abs=1e-3)


def test_a_version_tells_its_outliers_until_they_are_erased() -> None:
    datasets = DatasetStore(MemoryStore())  # type: ignore[arg-type]
    requests = [request(number, f"answer {number}", user=f"asker-{number}") for number in range(6)]
    ratings = {**{f"u-{number}": [1.0] * 6 for number in range(9)}, "troll": [-1.0] * 6}
    built = build({"max_user_share": 1.0}, requests, *rated_by(ratings))
    made = datasets.create(NewDataset("a", DatasetSpec()), built)
    assert [one.user for one in made.report.outliers] == [key_of("troll")[:12]]
    assert datasets.cut_out("a", 1, frozenset((user_mark("troll", None),))) == 6
    assert datasets.get("a").report.outliers == ()


USERS = st.lists(st.sampled_from([None, "ann", "bob", "eve", *map(str, range(20))]), min_size=1, max_size=40)


@given(USERS, st.integers(0, 3), st.sampled_from(["user", "session", "request"]))
def test_users_and_sessions_are_split_whole(users: list[str | None], seed: int, by: Any) -> None:
    split = DatasetSplit(by=by, validation=0.3, held_out=0.3, seed=seed)
    rows = [
        Row(source="logged", answer_id=f"c-{number}", user=user, session=user and f"s-{user}", messages=[])
        for number, user in enumerate(users)
    ]
    places: dict[Any, set[str]] = {}
    for row in rows:
        whole = {"user": row.user, "session": row.session, "request": row.answer_id}[by]
        places.setdefault(whole or row.answer_id, set()).add(split_of(row, split))
    assert all(len(found) == 1 for found in places.values())
    assert set().union(*places.values()) <= set(SPLITS)


def test_a_split_has_its_share() -> None:
    split = DatasetSplit(validation=0.2, held_out=0.1)
    found = [split_of(Row(source="logged", user=f"u-{number}", messages=[]), split) for number in range(5000)]
    assert abs(found.count("held_out") / 5000 - 0.1) < 0.02
    assert abs(found.count("validation") / 5000 - 0.2) < 0.02


def test_corrections_and_preferences_become_pairs() -> None:
    requests = [request(1, "bad"), request(2, "fine", "poor", asks="x"), request(3, "other", asks="y")]
    built = build(
        {},
        requests,
        said(1, correction="good"),
        said(2, completion_id="chatcmpl-2:0", preferred_over="chatcmpl-2:1"),
        said(3, preferred_over="chatcmpl-2:0"),
    )
    rows = built.rows["train"]
    assert built.report.other_prompt == 1
    dpo = examples_of("dpo", rows)
    assert [(one["chosen"], one["rejected"]) for one in dpo] == [("good", "bad"), ("fine", "poor")]
    sft = examples_of("sft", rows)
    assert [one["completion"] for one in sft] == ["good", "fine", "other"]
    kto = {one["completion"]: one["label"] for one in examples_of("kto", rows)}
    assert kto == {"bad": False, "good": True, "fine": True, "poor": False, "other": True}


def test_the_best_answer_of_a_prompt_is_learnt() -> None:
    requests = [request(1, "a", "b", "c", asks="x"), request(2, "bad"), request(3, "unrated")]
    built = build(
        {"logged": True},
        requests,
        said(1, completion_id="chatcmpl-1:0", score=0.25),
        said(2, completion_id="chatcmpl-1:1", score=0.75),
        said(3, completion_id="chatcmpl-1:2", score=-1.0),
        said(4, completion_id="chatcmpl-2", thumb="down"),
    )
    rows = built.rows["train"]
    assert [one["completion"] for one in examples_of("sft", rows)] == ["b", "unrated"]
    assert [(one["chosen"], one["rejected"]) for one in examples_of("dpo", rows)] == [("b", "c")]
    assert len(examples_of("kto", rows)) == 4
    (group,) = examples_of("grpo", rows)
    assert group["prompt_token_ids"] == [1, 2, 0]
    assert [one["reward"] for one in group["completions"]] == [0.25, 0.75, -1.0]
    assert group["completions"][0]["logprobs"] == [-0.5, -0.25]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS = [
    {"role": "user", "content": "add"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c"},
]


def test_jobs_take_the_examples() -> None:
    """Every kind's examples are what its job takes; earlier turns of the assistant are context."""
    row = Row(
        source="feedback", messages=TURNS, answer={"role": "assistant", "content": "3"}, rating=1.0, better="three",
        worse="3", token_ids=[5, 6], logprobs=[-0.5, 0.0004], prompt_token_ids=[1, 2], version=None,
    )  # fmt: skip
    other = row.model_copy(
        update={"answer": {"role": "assistant", "content": "4"}, "rating": -1.0, "better": None, "worse": None}
    )
    for kind, field in {"sft": "examples", "dpo": "examples", "kto": "examples", "grpo": "groups"}.items():
        examples = examples_of(kind, [row, other])  # type: ignore[arg-type]
        assert examples, kind
        JOBS[kind].model_validate({"adapter": "toy", field: examples})
    (sft,) = examples_of("sft", [row, other])
    assert sft == {"prompt": TURNS, "completion": "three"}
    calls = row.model_copy(update={"answer": {"role": "assistant", "tool_calls": [CALL]}, "better": None})
    (sft,) = examples_of("sft", [calls])
    assert [turn.get("weight") for turn in sft["messages"]] == [None, 0, None, None]
    assert sft["messages"][-1]["tool_calls"] == [CALL]
    JOBS["sft"].model_validate({"adapter": "toy", "examples": [sft]})


@pytest.mark.parametrize(
    ("line", "rating"),
    [
        ({"prompt": "a", "completion": "b"}, 1.0),
        ({"prompt": "a", "completion": "b", "label": False}, -1.0),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, 1.0),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, 1.0),
    ],
)
def test_lines_of_files_are_rows(line: dict[str, Any], rating: float) -> None:
    row = row_of_file(line, "file-1")
    assert (row.messages, row.rating) == ([{"role": "user", "content": "a"}], rating)


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"prompt": "a"},
        {"prompt": 3, "completion": "b"},
        {"text": "a"},
        {"prompt": "a", "chosen": "b"},
        {"messages": ["x"]},
    ],
)
def test_a_line_that_is_no_example_is_counted(line: dict[str, Any]) -> None:
    spec = DatasetSpec.model_validate({"feedback": False, "files": ["f"]})
    built = DatasetBuilder(spec, ListedLog([]), None).build([], {"f": [line, {"prompt": "a", "completion": "b"}]})
    assert (built.report.faulty_lines, sum(map(len, built.rows.values()))) == (1, 1)


_RECIPE = "Take two eggs, some flour, a pinch of salt and milk, stir it well and wait for an hour."
_ITEMS = (
    SuiteItem(prompt="What is  17 + 4?", expected=["21"]),
    SuiteItem(prompt="A recipe?", expected=[_RECIPE]),
    SuiteItem(prompt="Why does bread that was baked slowly keep?", expected=["Longer than that which was baked fast."]),
)


def _found(built: Built, kind: Any) -> list[ItemOverlap]:
    """Overlap of the items with what a job would learn from the training rows, as its gate looks for it."""
    examples = {"examples": examples_of(kind, built.rows["train"])}
    spec = JOBS[kind].model_validate({"kind": kind, "adapter": "a", **examples})
    texts = list(training_texts(spec, None))  # type: ignore[arg-type]  # nothing here is given as tokens
    hasher = TextHasher()
    return SuiteOverlap(_ITEMS).find([prompt_hashes(text) for text in texts], [hasher.grams(text) for text in texts])


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
@pytest.mark.parametrize(
    ("asks", "correction"),
    [
        ("what is 17 + 4", "It is 20."),  # an item's prompt, but for case and punctuation
        ("How are pancakes made?", f"Pancakes! {_RECIPE} Then fry them."),  # 13 words of an item's answer
        # 13 words that begin in its prompt
        ("Please: does bread that was baked slowly keep", "longer than that which was baked too fast?"),
    ],
)
def test_rows_that_would_teach_items_of_a_suite_are_left_out(kind: str, asks: str, correction: str) -> None:
    log = ListedLog([request(1, "a"), request(2, "b", asks=asks)])
    opinions = [said(1, score=-1, correction="a better answer"), said(2, score=-1, correction=correction)]
    spec = DatasetSpec.model_validate({"split": {"validation": 0.0, "held_out": 0.0}, "apart_from": ["items"]})
    taught = DatasetBuilder(spec, log, None).build(opinions, {})
    assert any(item.contaminated for item in _found(taught, kind))
    built = DatasetBuilder(spec, log, None).build(opinions, {}, suites=[SuiteOverlap(_ITEMS)])
    assert not any(item.contaminated for item in _found(built, kind))
    assert [row.messages[0]["content"] for row in built.rows["train"]] == ["question 1"]
    assert built.report.of_suites == 1
    assert built.opinions == ["fb_1"], "what is not taught is not used"


def test_held_out_rows_stay_though_a_suite_has_them() -> None:
    spec = DatasetSpec.model_validate({"split": {"validation": 0.0, "held_out": 0.99}})
    log = ListedLog([request(1, "21", asks="What is 17 + 4?")])
    built = DatasetBuilder(spec, log, None).build([said(1, score=1)], {}, suites=[SuiteOverlap(_ITEMS)])
    assert len(built.rows["held_out"]) == 1
    assert built.report.of_suites == 0
