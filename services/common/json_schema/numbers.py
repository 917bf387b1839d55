"""Sets of numbers that a JSON schema allows, exact at any size, and the regular expressions of their texts.

A bounded number is written without an exponent, and beyond 2**53 without a fraction. A reader that takes a fraction for
a double finds it on the same side of every bound: rounding keeps the order of numbers, and what would be rounded to an
exclusive bound is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

_INTEGER = "-?(?:0|[1-9][0-9]*)"
_EXPONENT = r"[eE](?:\+?(?:[0-9]{1,2}|[12][0-9]{2}|30[0-8])|-[0-3]?[0-9]{1,2})"
"""About those of doubles."""
_PLACES = 15
"""Digits of a fraction that is bounded: as many as a double keeps."""
_EDGE = Fraction(2**53)
_MOST_PLACES = 80
"""Most decimal places of a bound: each is three levels of an expression, and 250 are read."""
_MOST_DIGITS = 4000
_MOST_LISTED = 2048
_MOST_ENDINGS = 1000


class NumbersError(ValueError):
    """A set of numbers cannot be written; the message says which keyword is at fault."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """All numbers that fulfil every one of these.

    Args:
        whole: they are integers.
        low: none is less; None: any.
        low_open: nor equal.
        high: none is more; None: any.
        high_open: nor equal.
        step: they are multiples of it; None: of anything.
        values: they are among these; None: any.
    """

    whole: bool = False
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    step: Fraction | None = None
    values: frozenset[Fraction] | None = None

    def __and__(self, other: Numbers) -> Numbers:
        found = self._above(other.low, other.low_open)._below(other.high, other.high_open)
        steps = [step for step in (self.step, other.step) if step is not None]
        values = [each for each in (self.values, other.values) if each is not None]
        return replace(
            found,
            whole=self.whole or other.whole,
            step=None if not steps else _common_multiple(steps[0], steps[-1]),
            values=None if not values else values[0] & values[-1],
        )

    def _above(self, low: Fraction | None, is_open: bool) -> Numbers:
        if low is None or (self.low is not None and (self.low, self.low_open) >= (low, is_open)):
            return self
        return replace(self, low=low, low_open=is_open)

    def _below(self, high: Fraction | None, is_open: bool) -> Numbers:
        if high is None or (self.high is not None and (self.high, not self.high_open) <= (high, not is_open)):
            return self
        return replace(self, high=high, high_open=is_open)

    def __contains__(self, value: Fraction) -> bool:
        return not (
            (self.whole and value.denominator != 1)
            or (self.low is not None and (value < self.low or (self.low_open and value == self.low)))
            or (self.high is not None and (value > self.high or (self.high_open and value == self.high)))
            or (self.step is not None and (value / self.step).denominator != 1)
            or (self.values is not None and value not in self.values)
        )

    @property
    def listed(self) -> list[Fraction] | None:
        """Members in order, if they are few and each has a place; None otherwise."""
        if self.values is not None:
            return sorted(value for value in self.values if value in self)
        step = self._whole_step if self.is_whole else self.step
        if step is None or self.low is None or self.high is None:
            return None
        first, last = _ceil(self.low / step), _floor(self.high / step)
        if last - first >= _MOST_LISTED:
            return None
        members = (count * step for count in range(first, last + 1))
        return [value for value in members if value in self and (value.denominator == 1 or abs(value) < _told(value))]

    def texts(self) -> list[str] | None:
        """Texts of the members, if they are few; None otherwise."""
        listed = self.listed
        return None if listed is None else list(map(written, listed))

    def multiples(self) -> tuple[Fraction, Fraction | None, Fraction | None] | None:
        """Step, least and largest member, if it is all multiples of a step in between; None otherwise."""
        step = self._whole_step if self.is_whole else self.step
        if step is None or self.values is not None:
            return None
        low = high = None
        if self.low is not None:
            low = _ceil(self.low / step) * step
            low += step if self.low_open and low == self.low else 0
        if self.high is not None:
            high = _floor(self.high / step) * step
            high -= step if self.high_open and high == self.high else 0
        return step, low, high

    @property
    def is_whole(self) -> bool:
        """True if all members are integers."""
        return self.whole or (self.step is not None and self.step.denominator == 1)

    @property
    def _whole_step(self) -> Fraction:
        return Fraction(1) if self.step is None else _common_multiple(self.step, Fraction(1))

    @property
    def empty(self) -> bool:
        """True if no member can be written."""
        listed = self.listed
        if listed is not None:
            return not listed
        return self.low is not None and self.high is not None and self.expression() is None

    def expression(self) -> str | None:
        """A regular expression of the texts of its members; None if there are none.

        Raises:
            NumbersError: it cannot be written.
        """
        for bound in (self.low, self.high):
            if bound is not None and (abs(bound) >= 10**_MOST_DIGITS or bound.denominator > 10**_MOST_DIGITS):
                raise NumbersError(f"a bound has more than {_MOST_DIGITS} digits")
        listed = self.listed
        if listed is not None:
            return "|".join(map(written, listed)).replace(".", r"\.") if listed else None
        if self.low is None and self.high is None and self.step is None:
            return _INTEGER if self.whole else rf"{_INTEGER}(?:\.[0-9]+)?(?:{_EXPONENT})?"
        parts = self._whole_parts() if self.is_whole else self._decimal_parts()
        return "|".join(parts) if parts else None

    def _whole_parts(self) -> list[str]:
        low = None if self.low is None else _floor(self.low) + 1 if self.low_open else _ceil(self.low)
        high = None if self.high is None else _ceil(self.high) - 1 if self.high_open else _floor(self.high)
        step = self._whole_step.numerator
        digits = next((digits for digits in range(41) if 10**digits % step == 0), None)
        if digits is None or 10**digits // step > _MOST_ENDINGS:
            raise NumbersError(
                f"'multipleOf' {step} cannot be enforced here: give a minimum and a maximum at most {_MOST_LISTED} "
                "multiples apart, or leave it out"
            )
        endings = range(0, 10**digits, step)

        def magnitudes(low: int, high: int | None) -> Iterator[str]:
            """Grammar of the members that are not negative."""
            scale = 10**digits

            def range_of(ending: int) -> tuple[int, int | None]:
                return max(0, -((ending - low) // scale)), None if high is None else (high - ending) // scale

            for (first, last), alike in groupby(endings, range_of):
                tails = [f"{ending:0{digits}}" if digits else "" for ending in alike]
                if last is not None and last < first:
                    continue
                if first == 0 and digits:
                    yield from (str(int(tail)) for tail in tails)
                    first = 1
                tail = f"(?:{'|'.join(tails)})" if digits else ""
                yield from (f"{head}{tail}" for head in _range(first, last))

        return list(_signed(low, high, magnitudes))

    def _decimal_parts(self) -> list[str]:
        """Beyond what a double has fractions for, or tells one multiple from the next, integers only: their readers
        compare them exactly."""
        edge = _EDGE if self.step is None else _told(self.step)
        parts: list[str] = []
        if (self.low is None or self.low <= edge) and (self.high is None or self.high >= -edge):
            parts += (self & Numbers(low=-edge, high=edge))._scaled_parts()
        if self.high is None or self.high > edge:
            parts += (self & Numbers(whole=True, low=edge, low_open=True))._whole_parts()
        if self.low is None or self.low < -edge:
            parts += (self & Numbers(whole=True, high=-edge, high_open=True))._whole_parts()
        return parts

    def _scaled_parts(self) -> list[str]:
        places, endings = self._places()
        scale = 10**places
        low = None if self.low is None else _ceil(self.low * scale)
        high = None if self.high is None else _floor(self.high * scale)
        if low is not None and self.low is not None and self.low_open:
            low = _floor(_beyond(self.low, math.inf) * scale) + 1
        if high is not None and self.high is not None and self.high_open:
            high = _ceil(_beyond(self.high, -math.inf) * scale) - 1

        def magnitudes(low: int, high: int | None) -> Iterator[str]:
            first, last = low // scale, None if high is None else high // scale
            if first == last and high is not None:
                yield from _with_fraction([str(first)], low % scale, high % scale, places, endings)
                return
            if low % scale:
                yield from _with_fraction([str(first)], low % scale, scale - 1, places, endings)
                first += 1
            if high is not None and last is not None and high % scale != scale - 1:
                yield from _with_fraction([str(last)], 0, high % scale, places, endings)
                last -= 1
            if last is None or first <= last:
                yield from _with_fraction(list(_range(first, last)), 0, scale - 1, places, endings)

        return list(_signed(low, high, magnitudes))

    def _places(self) -> tuple[int, list[int] | None]:
        """Most digits of a fraction, and which fractions there may be, in units of the last digit; None: any."""
        if self.step is not None:
            places = next((places for places in range(17) if (self.step * 10**places).denominator == 1), None)
            unit = 0 if places is None else (self.step * 10**places).numerator
            if places is None or 10**places % unit or 10**places // unit > _MOST_ENDINGS:
                raise NumbersError(
                    f"'multipleOf' {float(self.step)} cannot be enforced here: give a minimum and a maximum at most "
                    f"{_MOST_LISTED} multiples apart, or leave it out"
                )
            return places, list(range(0, 10**places, unit))
        wanted = [decimals(bound) for bound in (self.low, self.high) if bound is not None]
        return max(_PLACES, min(max(wanted), _MOST_PLACES)), None


def _told(value: Fraction) -> Fraction:
    """Up to where numbers with as many digits behind the point are what a double says: 9007199254740985.5 is …985 or
    …986 to a reader, and no multiple any more."""
    return Fraction(10**_PLACES, 10 ** decimals(value))


def _beyond(bound: Fraction, towards: float) -> Fraction:
    """Number between an exclusive bound and all numbers that a reader's double tells from it."""
    try:
        nearest = float(bound)
    except OverflowError:
        return bound
    neighbour = math.nextafter(nearest, towards)
    if math.isinf(neighbour):
        return bound
    middle = (Fraction(nearest) + Fraction(neighbour)) / 2
    return max(bound, middle) if towards > 0 else min(bound, middle)


def _signed(low: int | None, high: int | None, magnitudes: Callable[[int, int | None], Iterator[str]]) -> Iterator[str]:
    """The texts of a range: those of its negative numbers and of the others.

    Args:
        magnitudes: the texts of a range of numbers that are not negative.
    """
    if low is None or low < 0:
        most = None if low is None else -low
        least = 1 if high is None or high >= 0 else -high
        if most is None or least <= most:
            yield from (f"-(?:{part})" for part in magnitudes(least, most))
    if high is None or high >= 0:
        least = max(0, low or 0)
        if high is None or least <= high:
            yield from magnitudes(least, high)


def _with_fraction(heads: list[str], low: int, high: int, places: int, endings: list[int] | None) -> Iterator[str]:
    """Numbers with one of some integer parts and a fraction of a range, which may be left out where it is 0."""
    if endings is None:
        tails = list(_fractions(f"{low:0{places}}", f"{high:0{places}}")) if places else []
    else:
        tails = sorted({f"{ending:0{places}}".rstrip("0") for ending in endings if low <= ending <= high} - {""})
    tail = rf"\.(?:{'|'.join(tails)})" if tails else ""
    if tail and low == 0:
        tail = f"(?:{tail})?"
    elif not tail and low > 0:
        return
    yield f"(?:{'|'.join(heads)}){tail}"


def _fractions(low: str, high: str) -> Iterator[str]:
    """The digits of a fraction, at least one, with any zeros at its end or none, in a range of equally many digits."""
    if not low:
        return
    if low == "0" * len(low) and high == "9" * len(high):
        yield f"[0-9]{{1,{len(low)}}}"
        return
    first, last = int(low[0]), int(high[0])
    below, above = low[1:], high[1:]
    if first == last:
        yield from _behind(str(first), below, above)
        return
    if below.strip("0"):
        yield from _behind(str(first), below, "9" * len(below))
        first += 1
    if above.strip("9"):
        yield from _behind(str(last), "0" * len(above), above)
        last -= 1
    if first <= last:
        yield f"[{first}-{last}]" + (f"[0-9]{{0,{len(below)}}}" if below else "")


def _behind(digit: str, low: str, high: str) -> Iterator[str]:
    tails = list(_fractions(low, high))
    may_end = not low.strip("0")
    if not tails:
        yield digit
    else:
        yield f"{digit}(?:{'|'.join(tails)}){'?' if may_end else ''}"


def _range(low: int, high: int | None) -> Iterator[str]:
    """Integers that are not negative, without leading zeros."""
    if high is not None and high < low:
        return
    if low == 0:
        yield "0"
        low = 1
    first = str(low)
    if high is None:
        if first.strip("0") == "1":
            yield f"[1-9][0-9]{{{len(first) - 1},}}"
            return
        yield from _alike(first, "9" * len(first))
        yield f"[1-9][0-9]{{{len(first)},}}"
        return
    last = str(high)
    if high < low:
        return
    if len(first) == len(last):
        yield from _alike(first, last)
        return
    yield from _alike(first, "9" * len(first))
    if len(last) - len(first) > 1:
        yield f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}"
    yield from _alike("1" + "0" * (len(last) - 1), last)


def _alike(low: str, high: str) -> Iterator[str]:
    """Strings of digits, all of one length, in a range."""
    if not low:
        yield ""
        return
    shared = next((place for place, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
    if shared == len(low):
        yield low
        return
    head, low, high = low[:shared], low[shared:], high[shared:]
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if low[1:].strip("0"):
        yield from (f"{head}{first}{tail}" for tail in _alike(low[1:], "9" * rest))
        first += 1
    above = bool(high[1:].strip("9"))
    if above:
        last -= 1
    if first <= last:
        yield f"{head}[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else "")
    if above:
        yield from (f"{head}{high[0]}{tail}" for tail in _alike("0" * rest, high[1:]))


def decimals(value: Fraction) -> int:
    """Digits behind the point of a decimal."""
    twos = fives = 0
    rest = value.denominator
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives)


def written(value: Fraction) -> str:
    """A decimal as it is written."""
    if value.denominator == 1 and abs(value.numerator) < 10**_MOST_DIGITS:
        return str(value.numerator)
    places = decimals(value)
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}}"
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{text}" if value < 0 else text


def _common_multiple(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator))


def _floor(value: Fraction) -> int:
    return value.numerator // value.denominator


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
