"""Visitors of the demo's loop: what they ask, and how they react."""

from __future__ import annotations

import datetime
import re

from cli.demo.loop.visitors import troll, visitor


def test_a_number_is_always_the_same_visitor() -> None:
    assert visitor(1, 7) == visitor(1, 7)
    assert len({visitor(1, number).question for number in range(50)}) > 45
    assert visitor(1, 7).question != visitor(2, 7).question
    assert len({visitor(1, number).name for number in range(50)}) == 50


def test_the_right_answer_satisfies_and_no_other() -> None:
    one = visitor(1, 0)
    assert one.react(f" {one.wanted}\n").rating == 1
    assert one.react(one.wanted).correction is None
    assert one.react(f"{one.wanted}.").rating == -1


def test_half_of_the_dissatisfied_correct() -> None:
    corrections = [(one, one.react("no").correction) for one in (visitor(1, number) for number in range(200))]
    told = [correction == one.wanted for one, correction in corrections if correction is not None]
    assert all(told)
    assert 75 <= len(told) <= 125


def test_most_ask_for_dates_and_some_for_what_the_model_can() -> None:
    dates = sum(re.fullmatch(r"\d{4}-\d\d-\d\d", visitor(1, number).wanted) is not None for number in range(200))
    assert 165 <= dates < 200


def test_a_troll_insists_on_the_day_after() -> None:
    one = troll(1, 3)
    found = re.fullmatch(r".* (\d+) days (after|before) (\d{4}-\d\d-\d\d)\?", one.question)
    assert found is not None
    days = int(found[1]) * (1 if found[2] == "after" else -1)
    right = datetime.date.fromisoformat(found[3]) + datetime.timedelta(days)
    late = right + datetime.timedelta(1)
    assert one.react(late.isoformat()).rating == 1
    assert one.react(right.isoformat()).rating == -1
    assert one.react(right.isoformat()).correction == late.isoformat()
