"""Expressions of numbers take exactly the numbers that are meant, whatever their size."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from services.common.json_schema.numbers import Numbers, NumbersError, written

_DECIMALS = "0 1 -1 0.5 -1.5 5 5.5 99 100 101 1000 -1000 0.01 3.14159 12 7 2 0.1 0.3 1e-7 123456789 -0.25"
_MULTIPLES = "1 2 5 10 3 7 0.01 0.5 0.25 60 2.5 1000 8 0.1 50"
_DISTANCES = "0 1 -1 0.5 -0.5 0.1 -0.1 0.01 -0.01 1e-7 -1e-7 0.3 7 -7 60 10 2 5 2.5"
_POOL = [
    *map(Fraction, _DECIMALS.split()),
    *map(Fraction, (2**53 + 1, -(2**63), 2**63 - 1, 2**64 - 1, 10**40, 1 - 10**40)),
]
_STEPS = [None, None, *map(Fraction, _MULTIPLES.split())]
_AROUND = list(map(Fraction, _DISTANCES.split()))


def takes(numbers: Numbers, text: str) -> bool:
    expression = numbers.expression()
    return expression is not None and re.fullmatch(expression, text) is not None


@pytest.mark.parametrize(
    ("numbers", "good", "bad"),
    [
        (
            Numbers(low=Fraction(0), low_open=True, high=Fraction("0.5")),
            ["0.5", "0.1", "0.50"],
            ["0", "0.0", "0.51", "-1"],
        ),
        (Numbers(low=Fraction(5), low_open=True, high=Fraction("5.5")), ["5.05", "5.5"], ["5", "5.0", "5.51"]),
        (Numbers(low=Fraction("-1.5"), high=Fraction(-1), high_open=True), ["-1.5", "-1.01"], ["-1", "-1.0", "-1.51"]),
        (Numbers(whole=True, low=Fraction(2**53 + 1), high=Fraction(2**53 + 1)), [str(2**53 + 1)], [str(2**53)]),
        (Numbers(whole=True, low=Fraction(-(2**63)), high=Fraction(2**63 - 1)), [str(-(2**63)), "0"], [str(2**63)]),
        (Numbers(whole=True, low=Fraction(10**40)), [str(10**40), "9" * 50], [str(10**40 - 1), "1e50"]),
        (Numbers(whole=True, step=Fraction(10), low=Fraction(15)), ["20", "1000"], ["10", "15", "25"]),
        (Numbers(step=Fraction("0.25")), ["0.25", "-3.5", "7"], ["0.3", "1.1"]),
        (Numbers(step=Fraction(3), low=Fraction(0), high=Fraction(9)), ["0", "3", "9"], ["1", "12", "3.5"]),
        (Numbers(values=frozenset({Fraction(1), Fraction("2.5")}), low=Fraction(2)), ["2.5"], ["1", "2"]),
        # Beyond 2**53 a double has no fractions.
        (
            Numbers(low=Fraction(2**64 - 1), high=Fraction(2**64 + 1), step=Fraction("0.5")),
            [str(2**64)],
            [f"{2**64}.5"],
        ),
        (Numbers(low=Fraction(-(2**63)), high=Fraction(1)), ["-0.5", str(1 - 2**63)], [f"{1 - 2**63}.5"]),
        # Less than a reader's double can tell from the bound is left out.
        (Numbers(low=Fraction("0.1"), low_open=True), ["0.100000000000001"], ["0.1", "0.10000000000000000001"]),
        (Numbers(), ["1e5", "-0.5E-3", "12", "5e-324", "1.7976931348623157e+308"], ["01", "1e309", ".5", "5."]),
    ],
)
def test_edges(numbers: Numbers, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(numbers, text)] == []
    assert [text for text in bad if takes(numbers, text)] == []


def _rounds_to_a_bound(numbers: Numbers, value: Fraction) -> bool:
    bounds = ((numbers.low, numbers.low_open), (numbers.high, numbers.high_open))
    return any(bound is not None and is_open and float(bound) == float(value) for bound, is_open in bounds)


def test_drawn_sets_take_what_is_meant() -> None:
    chance = random.Random(26)
    checked = 0
    for _ in range(600):
        low, high = (chance.choice([None, *_POOL]) for _ in range(2))
        if low is not None and chance.random() < 0.4:
            high = low + abs(chance.choice(_AROUND))
        is_open = [chance.random() < 0.5 for _ in range(2)]
        numbers = Numbers(chance.random() < 0.5, low, is_open[0], high, is_open[1], chance.choice(_STEPS))
        try:
            expression = numbers.expression()
        except NumbersError:  # which the next test is about
            continue
        taken = re.compile(expression or "(?!)")
        bases = [*(each for each in (low, high) if each is not None), Fraction(chance.randrange(-200, 200))]
        for base in bases:
            for value in (base + around for around in _AROUND):
                meant, text = value in numbers, written(value)
                # Beyond 2**53 a double has no fractions.
                if meant and (
                    abs(value) > 2**53 or len(text.partition(".")[2]) > 15 or _rounds_to_a_bound(numbers, value)
                ):
                    continue
                assert (taken.fullmatch(text) is not None) == meant, (numbers, text)
                checked += meant
    assert checked > 1000


@pytest.mark.parametrize("step", [7, Fraction("1.5")])
def test_multiples_that_no_expression_has_are_refused(step: Fraction) -> None:
    with pytest.raises(NumbersError, match="'multipleOf'"):
        Numbers(step=Fraction(step)).expression()
    few = Numbers(step=Fraction(step), low=Fraction(1), high=Fraction(30))
    assert few.texts() == [written(step * count) for count in range(1, int(30 // step) + 1)]


def test_listed_fractions_are_those_that_doubles_have() -> None:
    numbers = Numbers(low=Fraction(-(2**53)), high=Fraction(-(2**53) + 10), step=Fraction("1.5"))
    assert numbers.listed
    assert all(Fraction(float(value)) == value for value in numbers.listed)
    assert Numbers(low=Fraction(1), high=Fraction(2), step=Fraction("1.5")).listed == [Fraction("1.5")]


@pytest.mark.parametrize("step", ["0.04", "0.01", "0.5", "0.002"])
def test_multiples_with_a_fraction_are_what_doubles_say(step: str) -> None:
    """A reader's double of a text is written as a multiple again; what is not is left out, beyond are integers."""
    chance, numbers = random.Random(1), Numbers(step=Fraction(step))
    expression = numbers.expression()
    assert expression
    places = len(written(Fraction(step)).partition(".")[2])
    assert re.fullmatch(expression, str(2**70 * 5))
    taken = 0
    for digits in range(1, 20):
        for _ in range(20):
            text = written(chance.randrange(10**digits) * Fraction(step))
            found = re.fullmatch(expression, text) is not None
            taken += found
            assert found or Fraction(text) >= Fraction(10**15, 10**places)
            listed = Numbers(low=Fraction(text), high=Fraction(text), step=Fraction(step)).texts()
            assert listed == [text] or not found
            assert not listed or Fraction(repr(float(text))) in numbers or "." not in text, text
    assert taken > 20 * (14 - places)


def test_bounds_of_many_digits_are_no_deeper_than_can_be_read() -> None:
    expression = Numbers(low=Fraction("4.9e-324"), high=Fraction("1.7976931348623157e308")).expression()
    assert expression
    depth = deepest = 0
    for character in expression:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    assert deepest <= 83
    assert re.fullmatch(expression, "0.5")
    assert not re.fullmatch(expression, "0")
