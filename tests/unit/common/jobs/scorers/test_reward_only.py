"""Scorers that only rewards have: penalties, and tournaments between completions of a prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from services.common.jobs.scorers.grants import Grants, JudgeQuestion, JudgeReply
from services.common.jobs.scorers.registry import Rewards, RewardSpec, SuiteScorerSpec
from services.common.jobs.scorers.sample import Sample

SPEC: TypeAdapter[Any] = TypeAdapter(RewardSpec)


def score(samples: Sequence[Sample], spec: dict[str, Any], **grants: Any) -> list[float]:
    return Rewards([SPEC.validate_python(spec)], Grants(**grants)).score(samples)


def test_a_length_costs_between_two_bounds() -> None:
    samples = [Sample("q", "x", tokens) for tokens in (0, 10, 15, 20, 500)]
    assert score(samples, {"type": "length", "free": 10, "most": 20}) == [0, 0, -0.5, -1, -1]
    assert score(samples[-1:], {"type": "length", "free": 10, "most": 20, "weight": 0.25}) == [-0.25]
    with pytest.raises(ValidationError, match="grows from free to most"):
        SPEC.validate_python({"type": "length", "free": 10, "most": 10})


@pytest.mark.parametrize(
    ("text", "truncated", "found"),
    [
        ("<a>1</a>", False, 0.0),
        ("<a>1</a>", True, -1 / 3),
        ("</a>1<a>", False, -1 / 3),
        ("<a>1</a><a>", False, -1 / 3),
        ("1", True, -2 / 3),
        ("one two three four five " * 4, False, -2 / 3),
        ("one two three four five " * 4, True, -1.0),
    ],
)
def test_a_format_costs_by_the_share_of_its_rules(text: str, truncated: bool, found: float) -> None:
    spec = {"type": "format", "tags": ["<a>", "</a>"], "ends": True, "most_repeated": 0.5}
    assert score([Sample("q", text, 3, truncated)], spec) == [pytest.approx(found)]


def test_thoughts_are_part_of_the_format() -> None:
    sample = Sample("q", "<think>x</think>4", 3, said="4")
    assert score([sample], {"type": "format", "tags": ["<think>", "</think>"]}) == [0.0]


def test_a_format_without_rules_is_refused() -> None:
    with pytest.raises(ValidationError, match="no completion breaks a rule"):
        SPEC.validate_python({"type": "format"})
    with pytest.raises(ValidationError):
        TypeAdapter(SuiteScorerSpec).validate_python({"type": "length", "free": 1, "most": 2})


def longest_wins(asked: list[str]) -> Callable[..., list[JudgeReply]]:
    """A judge that favours the longer of two answers, and with 0.9 of its mass the first of equal ones."""

    def ask(version: Any, questions: Sequence[JudgeQuestion], interrupt: Callable[[], None]) -> list[JudgeReply]:
        del version, interrupt
        replies = []
        for question in questions:
            asked.append(question.prompt)
            first, second = (len(part) for part in question.prompt.split("|"))
            chance = 0.9 if first >= second else 0.1
            replies.append(JudgeReply({"A": math.log(chance), "B": math.log(1 - chance)}))
        return replies

    return ask


def test_a_tournament_compares_completions_of_a_prompt() -> None:
    asked: list[str] = []
    spec = {"type": "tournament", "prompt": "{first}|{second}"}
    samples = [Sample("q", text, 1) for text in ("a", "bb", "ccc")] + [Sample("other", "d" * 9, 1)]
    found = score(samples, spec, judge=longest_wins(asked))
    assert found == pytest.approx([0.1, 0.5, 0.9, 0.5])
    assert sorted(asked) == sorted(["a|bb", "bb|a", "a|ccc", "ccc|a", "bb|ccc", "ccc|bb"])


def test_a_tournament_of_few_comparisons_and_of_equal_texts() -> None:
    asked: list[str] = []
    spec = {"type": "tournament", "prompt": "{first}|{second}", "opponents": 2}
    samples = [Sample("q", "x" * (1 + number), 1) for number in range(8)]
    found = score(samples, spec, judge=longest_wins(asked))
    assert len(asked) == 2 * 8
    # In a ring each plays its neighbours: the shortest loses both, the longest wins both.
    assert found == pytest.approx([0.1, *[0.5] * 6, 0.9])
    asked.clear()
    assert score([Sample("q", "same", 1)] * 3, spec, judge=longest_wins(asked)) == [0.5] * 3
    assert not asked


@pytest.mark.parametrize("count", [4, 5, 8, 9])
def test_nobody_plays_more_than_the_opponents_that_are_paid_for(count: int) -> None:
    for opponents in range(1, count + 1):
        asked: list[str] = []
        spec = {"type": "tournament", "prompt": "{first}|{second}", "opponents": opponents}
        samples = [Sample("q", "x" * (1 + number), 1) for number in range(count)]
        score(samples, spec, judge=longest_wins(asked))
        played = Counter(len(side) for pair in asked for side in pair.split("|"))
        most = min(opponents, count - 1)
        # Both orders of each pair; the one that an odd ring leaves out has one opponent fewer.
        left_out = most % 2 * count % 2
        assert sorted(played[1 + number] for number in range(count)) == sorted(
            [2 * most] * (count - left_out) + [2 * (most - 1)] * left_out
        )
