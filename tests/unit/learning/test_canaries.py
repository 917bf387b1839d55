"""Canaries without a store: arms and the ids that tell them, signs of answers, and guardrails."""

from __future__ import annotations

import math
import random

import pytest
from pydantic import ValidationError

from services.common.text.output_parser import TextDelta
from services.common.text.tool_calls.parser import ToolDelta
from services.learning.canaries.answers import AnswerInCanary, Counts, calls_of, counts_json, counts_of, repeats
from services.learning.canaries.enrolment import Enrolment, answer_digits, arm_of_answer, arm_of_session, enrol
from services.learning.canaries.guardrails import guarded
from services.learning.canaries.policy import CanaryPolicy, Guardrails
from services.learning.canaries.record import ARMS
from services.learning.canaries.refusals import OPENINGS, refuses
from services.learning.canaries.store import Route

KEY, OTHER = "00" * 16, "11" * 16


def route(key: str = KEY, share: float = 0.25) -> Route:
    return Route(id="canary_0", adapter="toy", current="toy@1", candidate="toy@2", share=share, attached=True, key=key)


@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "resp_", "msg-"])
def test_an_id_tells_its_arm_to_who_has_the_key(prefix: str) -> None:
    for arm in ARMS:
        answer = prefix + answer_digits(Enrolment(route(), arm))
        assert len(answer) == len(prefix) + 32
        assert arm_of_answer(KEY, answer) == arm_of_answer(KEY, f"{answer}:3") == arm
        assert arm_of_answer(OTHER, answer) is None
        forged = answer[:-1] + ("0" if answer[-1] != "0" else "1")
        assert arm_of_answer(KEY, forged) is None
    assert arm_of_answer(KEY, prefix + answer_digits(None)) is None
    assert arm_of_answer(KEY, "toolu_1") is None


def test_sessions_stay_and_shares_hold() -> None:
    arms = [arm_of_session(KEY, 0.25, "key-1", f"s-{number}") for number in range(4000)]
    assert 0.22 < arms.count("candidate") / len(arms) < 0.28
    assert arms == [enrol(route(), "key-1", f"s-{number}", "ann").arm for number in range(4000)]
    others = [arm_of_session(KEY, 0.25, "key-2", f"s-{number}") for number in range(4000)]
    again = [arm_of_session(OTHER, 0.25, "key-1", f"s-{number}") for number in range(4000)]
    for drawn in (others, again):  # of other keys, and of the next canary: drawn anew
        both = sum(one == two == "candidate" for one, two in zip(arms, drawn, strict=True))
        assert 0.04 < both / len(arms) < 0.09
    users = {enrol(route(), "key-1", None, "ann").arm for _ in range(50)}
    assert len(users) == 1
    chance = [enrol(route(), "key-1", None, None).arm for _ in range(4000)]
    assert 0.22 < chance.count("candidate") / len(chance) < 0.28


def test_signs_of_answers() -> None:
    assert repeats([1, 2, 3, 4] * 20)
    assert not repeats(list(range(80)))
    assert not repeats([1, 2, 3, 4] * 4), "too short to tell"
    good = ToolDelta(0, call_id="call_1", name="f", arguments='{"a": ')
    rest = ToolDelta(0, arguments="1}")
    assert calls_of([TextDelta("so"), good, rest], cut_off=False) == (True, False)
    assert calls_of([good], cut_off=False) == (True, True)
    assert calls_of([good], cut_off=True) == (True, False)
    deep = ToolDelta(0, arguments="[" * 100_000 + "]" * 100_000 + "}")
    assert calls_of([good, deep], cut_off=False) == (True, True), "no client reads it"
    assert calls_of([TextDelta("<tool_"), TextDelta("call>x")], cut_off=False) == (True, True)
    assert calls_of([TextDelta("<tool_call>", reasoning=True)], cut_off=False) == (False, False)
    answer = AnswerInCanary()
    answer.take([TextDelta("a")], [1, 2, 3])
    counts = answer.ended("length")
    assert (counts.answers, counts.cut_off, counts.tokens, counts.whole) == (1, 1, 3, 1)
    assert counts.log_tokens == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("I can't help with that.", True),
        ("  **I’m  sorry,\nbut no**", True),
        ("SORRY, I CANNOT", True),
        ("You can; I can't.", False),
        ("", False),
    ],
)
def test_refusals_are_told_by_their_opening(text: str, told: bool) -> None:
    assert refuses(text, OPENINGS) is told
    answer = AnswerInCanary(OPENINGS)
    answer.take([TextDelta("I can't think", reasoning=True), *map(TextDelta, text)], [1])
    assert answer.ended("stop").refusals == told
    assert AnswerInCanary().ended("stop").refusals == 0
    assert refuses("Nope, never", ["nope"])


def test_an_answer_with_calls_is_no_refusal() -> None:
    answer = AnswerInCanary(OPENINGS)
    answer.take([TextDelta("I can't say, so I look:"), ToolDelta(0, call_id="call_1", name="f", arguments="{}")], [1])
    assert (answer.ended("tool_calls").refusals, answer.ended("tool_calls").calls) == (0, 1)


def test_counts_of_gateways_add_up() -> None:
    one, two = Counts(3, errors=1, seconds=1.5), Counts(4, tokens=9)
    sums = counts_of([counts_json({"current": one, "candidate": two}), counts_json({"current": two})])
    assert sums == {"current": Counts(7, errors=1, seconds=1.5, tokens=9), "candidate": two}


def crossed(current: Counts, candidate: Counts) -> set[str]:
    return {one.name for one in guarded(Guardrails(), current, candidate) if one.crossed}


def test_guardrails_see_what_is_much_worse_and_not_the_same() -> None:
    before = Counts(200, errors=2, calls=100, log_tokens=198 * 5.0, log_tokens_squares=198 * 25.5)
    assert crossed(before, Counts(19, errors=19)) == set(), "too few"
    assert crossed(before, Counts(20, errors=15)) == {"errors"}
    short = Counts(40, log_tokens=40 * 3.0, log_tokens_squares=40 * 9.5)
    assert crossed(before, short) == {"length"}
    assert crossed(before, Counts(40, repetition=30, cut_off=30, calls=30, broken_calls=20)) >= {
        "repetition",
        "cut_off",
        "broken_calls",
    }
    assert crossed(before, Counts(40, refusals=30)) == {"refusals"} | crossed(before, Counts(40))
    assert crossed(Counts(), Counts(50, errors=50)) == set(), "nothing to compare with"


def test_chance_alone_hardly_crosses_a_guardrail() -> None:
    """At any of 100 looks; the candidate is no worse."""
    chance = random.Random(7)
    alarms = 0
    for _ in range(50):
        arms = Counts(), Counts()
        for _ in range(100):
            for arm, answers in zip(arms, (45, 5), strict=True):
                for _ in range(answers):
                    tokens = chance.gauss(5, 1)
                    error = chance.random() < 0.05
                    more = Counts(1, errors=1) if error else Counts(1, log_tokens=tokens, log_tokens_squares=tokens**2)
                    arm.add(more)
            if crossed(*arms):
                alarms += 1
                break
    assert alarms <= 1


def test_nonsense_is_no_policy() -> None:
    for said in ({"share": 0.6}, {"share": 0}, {"gain": 3}, {"sources": []}, {"min_seconds": 5, "max_seconds": 5}):
        with pytest.raises(ValidationError):
            CanaryPolicy.model_validate(said)
