"""Rules of objects: known members in order, others behind them, and the number of members."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.engine.constraints.schema.members import Member, Others
from services.engine.constraints.schema.rules import (
    NOTHING,
    Chain,
    Expression,
    Literal,
    OneOf,
    Terminal,
    Times,
    chain,
    maybe,
)
from services.engine.constraints.schema.shapes import Demands, Objects
from services.engine.constraints.schema.strings import spelled

_OPEN, _CLOSE, _COMMA, _COLON = Literal("{"), Literal("}"), Literal(","), Literal(":")
_MOST_COUNTED = 20_000


class ObjectRules:
    """Writes the rules of one object.

    Args:
        value: returns the rule of a value under some demands.
        define: makes a rule of an expression and returns a reference to it.
    """

    def __init__(self, value: Callable[[Demands], Expression], define: Callable[[Expression], Expression]) -> None:
        self._value = value
        self._define = define

    def rules(self, objects: Objects, members: Sequence[Member], others: Sequence[Others]) -> Expression:
        """Expression of an object.

        Raises:
            Refused: the number of members cannot be enforced.
        """
        known = [chain(Literal(spelled(each.name)), _COLON, self._value(each.value)) for each in members]
        other = OneOf(tuple(chain(Terminal(each.terminal), _COLON, self._value(each.value)) for each in others))
        required = [each.required for each in members]
        least, most = objects.least, objects.most
        count = len(members)
        if most is not None and (most < least or most < sum(required)):
            return NOTHING
        if least <= sum(required) and (most is None or (most >= count and not others)):
            inside = self._any_number(known, required, other)
        else:
            self._check_counts(objects, count, bool(others))
            inside = self._counted(known, required, other, least, most)
        return chain(_OPEN, inside, _CLOSE)

    def _any_number(self, known: list[Chain], required: list[bool], other: Expression) -> Expression:
        more_others = Times(chain(_COMMA, other))
        if True in required:
            first = required.index(True)
            ahead = [maybe(member, _COMMA) for member in known[:first]]
            behind = [
                chain(_COMMA, member) if needed else maybe(_COMMA, member)
                for member, needed in zip(known[first + 1 :], required[first + 1 :], strict=True)
            ]
            return chain(*ahead, known[first], *behind, more_others)
        options: list[Expression] = [Chain(), chain(other, more_others)]
        tail: Expression = more_others
        for member in reversed(known):
            options.append(chain(member, tail))
            tail = self._define(chain(maybe(_COMMA, member), tail))
        return OneOf(tuple(options))

    def _check_counts(self, objects: Objects, count: int, others: bool) -> None:
        at, least = objects.counted[0], objects.least
        if others and least > count + 1:
            # An unlisted name may come twice, and counts once.
            raise at.refuse(
                "minProperties",
                f"{least} is enforced for names that are listed only, of which there are {count}, and one more: list "
                "the names in properties, required or an enum of propertyNames, or leave it out",
            )
        if not others and least > count:
            raise at.refuse("minProperties", f"{least} cannot be had: there are {count} names")
        if (count + 1) * (max(least, objects.most or 0) + 2) > _MOST_COUNTED:
            raise at.refuse("minProperties", "or 'maxProperties' is too much to be counted here: leave it out")

    def _counted(
        self, known: list[Chain], required: list[bool], other: Expression, least: int, most: int | None
    ) -> Expression:
        """Members with a count: an expression for each number of members so far. The unlisted ones together count as
        one."""
        top = max(least, most or 0) + 1
        below: list[Expression] = [self._ending(other, so_far, least, most) for so_far in range(top + 1)]
        for member, needed in zip(reversed(known), reversed(required), strict=True):
            here: list[Expression] = []
            for so_far in range(top + 1):
                ahead = member if so_far == 0 else chain(_COMMA, member)
                after = below[min(so_far + 1, top)]
                with_it = NOTHING if most is not None and so_far >= most else chain(ahead, after)
                here.append(self._define(with_it if needed else OneOf((with_it, below[so_far]))))
            below = here
        return below[0]

    def _ending(self, other: Expression, so_far: int, least: int, most: int | None) -> Expression:
        room = None if most is None else most - so_far
        if room is not None and room < 0:
            return NOTHING
        needed = least - so_far
        if needed > 1:
            return NOTHING
        first = chain(other) if so_far == 0 else chain(_COMMA, other)
        some = chain(first, Times(chain(_COMMA, other), 0, None if room is None else room - 1))
        options: list[Expression] = [] if needed == 1 else [Chain()]
        if room is None or room > 0:
            options.append(some)
        return self._define(OneOf(tuple(options)))
