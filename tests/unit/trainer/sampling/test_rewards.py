"""Every kind of reward, with what models write when they are paid for it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import TypeAdapter

from services.common.errors import InvalidRequest
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.json_schema import parse
from services.common.jobs.scorers.of_texts.numeric import last_number
from services.common.jobs.scorers.registry import Rewards, RewardSpec
from services.common.jobs.scorers.sample import Sample, without_thinking
from tests.training_support import TrainingHost

SPEC: TypeAdapter[Any] = TypeAdapter(RewardSpec)


def score(text: str, *specs: dict[str, Any], answer: str | None = None, **sample: Any) -> float:
    rewards = Rewards([SPEC.validate_python(spec) for spec in specs], Grants())
    return rewards.score([Sample("q", text, 3, answer=answer, **sample)])[0]


@pytest.mark.parametrize(
    ("text", "options", "found"),
    [
        (" Paris\n", {}, 1.0),
        ("paris", {}, 0.0),
        ("PARIS", {"ignore_case": True}, 1.0),
        (" Paris", {"strip": False}, 0.0),
        ("Paris!", {}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_exact(text: str, options: dict[str, Any], found: float) -> None:
    assert score(text, {"type": "exact", **options}, answer="Paris") == found


@pytest.mark.parametrize(
    ("text", "pattern", "match", "found"),
    [
        ("the answer is 42.", r"\b42\b", "search", 1.0),
        ("the answer is 42.", r"\b42\b", "full", 0.0),
        ("a 4.2", "{answer}", "search", 0.0),
        ("a 4+2", "{answer}", "search", 1.0),
        ("\ud800 4+2", "{answer}", "search", 1.0),
        ("line\n4+2", "^{answer}$", "search", 0.0),
        ("line\n4+2", "(?m)^{answer}$", "search", 1.0),
    ],
)
def test_regex(text: str, pattern: str, match: str, found: float) -> None:
    assert score(text, {"type": "regex", "pattern": pattern, "match": match}, answer="4+2") == found


@pytest.mark.parametrize(
    ("text", "answer", "options", "found"),
    [
        ("3 + 4 = 7", "7", {}, 1.0),
        ("7 is wrong, it is 8", "7", {}, 0.0),
        ("about 1,234.5 km", "1234.5", {}, 1.0),
        ("-2e3", "-2000", {}, 1.0),
        (".5", "0.5", {}, 1.0),
        ("3.14", "3.14159", {}, 0.0),
        ("3.14", "3.14159", {"tolerance": 0.01}, 1.0),
        ("101", "100", {"relative_tolerance": 0.02}, 1.0),
        ("no number", "7", {}, 0.0),
        ("1e999", "7", {}, 0.0),
        ("nan inf", "7", {}, 0.0),
        ("٧", "7", {}, 0.0),
    ],
)
def test_numeric(text: str, answer: str, options: dict[str, Any], found: float) -> None:
    assert score(text, {"type": "numeric", **options}, answer=answer) == found


def test_the_last_number_of_a_huge_text() -> None:
    """In linear time, counted in what this process computes: quadratic would be minutes."""
    started = time.process_time()
    assert last_number("1," * 200_000 + " 12") == 12
    assert last_number("9" * 100_000) is None
    assert last_number("e" * 100_000) is None
    assert time.process_time() - started < 5


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"n": 1}', 1.0),
        (' {"n": 1}\n', 1.0),
        ('{"n": "1"}', 0.0),
        ('{"n": 1, "m": 2}', 0.0),
        ("{'n': 1}", 0.0),
        ('{"n": NaN}', 0.0),
        ('{"n": Infinity}', 0.0),
        ('{"n": 1e999}', 0.0),
        ('{"n": 1, "\\ud800": 1}', 0.0),
        ('"\\ud800"', 0.0),
        ('```json\n{"n": 1}\n```', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ('{"n":' * 50_000, 0.0),
        ('{"n": ' + "9" * 5000 + "}", 0.0),
        ('{"n": 1}' + " " * 100_000, 0.0),
    ],
)
def test_json_schema(text: str, found: float) -> None:
    assert score(text, {"type": "json_schema", "json_schema": SCHEMA}) == found


def test_json_is_bounded_in_depth() -> None:
    assert parse("[" * 64 + "]" * 64)
    with pytest.raises(ValueError, match="nested over 64 deep"):
        parse("[" * 65 + "]" * 65)
    with pytest.raises(ValueError, match="nested"):
        parse("[" * 30_000 + "]" * 30_000)


def test_weighted_rewards_add_up() -> None:
    specs = (
        {"type": "numeric", "weight": 2},
        {"type": "regex", "pattern": "please", "weight": 0.25},
        {"type": "regex", "pattern": "!", "weight": -1},
    )
    assert score("please, 7", *specs, answer="7") == 2.25
    assert score("7!", *specs, answer="7") == 1.0


def test_a_bad_pattern_is_refused_again_here() -> None:
    with pytest.raises(InvalidRequest, match=r"generate.reward\[1\].pattern"):
        score("x", {"type": "exact"}, {"type": "regex", "pattern": "("})


def test_scoring_can_be_interrupted() -> None:
    class Cancelled(Exception):
        pass

    def interrupt() -> None:
        raise Cancelled

    for spec in ({"type": "exact"}, {"type": "json_schema", "json_schema": SCHEMA}):
        with pytest.raises(Cancelled):
            Rewards([SPEC.validate_python(spec)], Grants()).score([Sample("q", "x", 1)], interrupt)


def test_thoughts_are_not_judged(host: TrainingHost) -> None:
    codec = host.codec
    opened, closed = codec.token_id("<think>"), codec.token_id("</think>")
    assert opened is not None
    assert closed is not None
    thought, said = codec.encode("it may be 7"), codec.encode(" 8")
    question = codec.encode("What is it?")
    assert without_thinking(codec, question, said) is None
    assert without_thinking(codec, [*question, opened], [*thought, closed, *said]) == " 8"
    assert without_thinking(codec, question, [opened, *thought, closed, *said]) == " 8"
    assert without_thinking(codec, [*question, opened], thought) == ""
    assert without_thinking(codec, question, [opened, *thought]) == ""
    assert without_thinking(codec, [*question, opened, closed], said) is None
    assert score("it may be 7 8", {"type": "numeric"}, answer="7", said=" 8") == 0.0
