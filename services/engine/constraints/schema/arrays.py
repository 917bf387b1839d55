"""Rules of arrays: items by place, counts, items that must be contained, items that must differ."""

from __future__ import annotations

from collections.abc import Callable

from services.engine.constraints.schema.rules import (
    MOST_PERMUTED,
    NOTHING,
    Chain,
    Expression,
    Literal,
    OneOf,
    Permutation,
    Times,
    chain,
    maybe,
)
from services.engine.constraints.schema.shapes import Arrays, Demands, joined

_OPEN, _CLOSE, COMMA = Literal("["), Literal("]"), Literal(",")
_MOST_PLACES = 64


def array(
    arrays: Arrays, value: Callable[[Demands], Expression], listed: Callable[[Demands], list[str] | None]
) -> Expression:
    """Expression of an array.

    Args:
        value: returns the rule of a value under some demands.
        listed: returns the texts of all values under some demands if they are few scalars, else None.

    Raises:
        Refused: the demands cannot be enforced.
    """
    if arrays.most is not None and arrays.most < arrays.least:
        return NOTHING
    if arrays.unique and (arrays.most is None or arrays.most > 1):
        return chain(_OPEN, _different(arrays, listed), _CLOSE)
    if arrays.contains:
        return chain(_OPEN, _containing(arrays, value), _CLOSE)
    return chain(_OPEN, _items(arrays, value), _CLOSE)


def _items(arrays: Arrays, value: Callable[[Demands], Expression]) -> Expression:
    least, most = arrays.least, arrays.most
    if most == 0:
        return Chain()
    prefix = arrays.prefix if most is None else arrays.prefix[:most]
    if not prefix:
        item = value(arrays.rest)
        more = Times(chain(COMMA, item), max(0, least - 1), None if most is None else most - 1)
        return chain(item, more) if least else maybe(item, more)
    count = len(prefix)
    tail: Expression = Chain()
    if most is None or most > count:
        tail = Times(chain(COMMA, value(arrays.rest)), max(0, least - count), None if most is None else most - count)
    for place in range(count - 1, 0, -1):
        here = chain(COMMA, value(prefix[place]), tail)
        tail = here if place < least else maybe(here)
    here = chain(value(prefix[0]), tail)
    return here if least else maybe(here)


def _containing(arrays: Arrays, value: Callable[[Demands], Expression]) -> Expression:
    """Items of which some must fulfil ``contains``; the first of those is at one of several places."""
    wanted = arrays.contains[0]
    least, most = arrays.least, arrays.most
    if len(arrays.contains) > 1 or arrays.prefix:
        raise wanted.at.refuse("contains", "is not enforced beside prefixItems or another 'contains': leave one out")
    hit = value(joined(arrays.rest, wanted.demands))
    item = value(arrays.rest)
    if most is None and least <= wanted.least:
        ahead = Times(chain(item, COMMA))
        more = Times(chain(COMMA, item))
        again = Times(chain(COMMA, Times(chain(item, COMMA)), hit, more), wanted.least - 1, wanted.least - 1)
        return chain(ahead, hit, more, again)
    if wanted.least > 1 or (most or least) > _MOST_PLACES:
        raise wanted.at.refuse(
            "contains",
            f"is enforced beside minItems or maxItems up to {_MOST_PLACES} and a minContains of 1: leave one out",
        )
    options: list[Expression] = [
        chain(
            Times(chain(item, COMMA), place, place),
            hit,
            Times(chain(COMMA, item), max(0, least - place - 1), None if most is None else most - place - 1),
        )
        for place in range(least if most is None else most)
    ]
    if most is None:
        options.append(chain(Times(chain(item, COMMA), least, None), hit, Times(chain(COMMA, item))))
    return OneOf(tuple(options))


def _different(arrays: Arrays, listed: Callable[[Demands], list[str] | None]) -> Expression:
    at = arrays.unique[0]
    texts = None if arrays.prefix or arrays.contains else listed(arrays.rest)
    if texts is None:
        raise at.refuse(
            "uniqueItems",
            "is enforced for items of an enum only: leave it out, set maxItems to 1, or give the items an enum",
        )
    if len(texts) > MOST_PERMUTED:
        raise at.refuse("uniqueItems", f"is enforced for an enum of at most {MOST_PERMUTED} items: leave it out")
    most = len(texts) if arrays.most is None else min(arrays.most, len(texts))
    if most < arrays.least:
        return NOTHING
    if not most:
        return Chain()
    return Permutation(tuple(map(Literal, texts)), COMMA, arrays.least, most)
