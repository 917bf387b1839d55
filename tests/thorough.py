"""The tests that only `make test-all` runs: marked `thorough`, the expensive rest of a promise that a cheaper case in
the same module keeps in `make test` (tests/unit/test_thorough.py).

Of a parametrised test marked `sampled`, cases of a product are thorough but for a few in which each value of each
parameter still occurs; with a number, all but that many, which lie evenly among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest

Case = Mapping[str, int]
"""Parameter → number of its value."""


def covering(cases: Sequence[Case]) -> set[int]:
    """Places of few cases that together have each value of each parameter: always the one with most values that none
    before it has."""
    left = {value for case in cases for value in case.items()}
    found = set()
    while left:
        best = max(range(len(cases)), key=lambda place: len(left & cases[place].items()))
        found.add(best)
        left -= cases[best].items()
    return found


def spread(keep: int, count: int) -> set[int]:
    """Places of ``keep`` cases of ``count``, evenly among them, the first included.

    Raises ValueError if none is kept.
    """
    if keep < 1:
        raise ValueError("a sampled test keeps at least one case in `make test`")
    return {number * count // min(keep, count) for number in range(min(keep, count))}


def numbered(params: Sequence[Mapping[str, object]]) -> list[Case]:
    """Each case of a parametrised test, by the values that it was given: the cases of a product share those. pytest's
    own ``indices`` do not tell: there each case has numbers of its own."""
    numbers: dict[tuple[str, int], int] = {}
    return [
        {name: numbers.setdefault((name, id(value)), len(numbers)) for name, value in case.items()} for case in params
    ]


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Marks what is left out of the samples of sampled tests."""
    sampled: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") is not None:
            sampled.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sampled.values():
        (mark,) = cases[0].iter_markers("sampled")
        kept = (
            spread(*mark.args, len(cases))
            if mark.args
            else covering(numbered([case.callspec.params for case in cases]))
        )
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker("thorough")
