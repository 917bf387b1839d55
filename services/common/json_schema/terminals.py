"""Patterns written as terminals of llguidance's variant of Lark, which can be intersected and negated.

A text is matched as it stands, or (``quoted``) as it stands in a string of JSON without the quotes, where every
character has one spelling: so lengths, intersections and complements of what is written are those of the texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product

from services.common.json_schema.characters import Characters
from services.common.json_schema.patterns import (
    ANY,
    Begin,
    Choice,
    End,
    Look,
    PatternError,
    Repeat,
    Sequence,
    Tree,
    parse,
    words,
)

_MOST_BRANCHES = 256
_Items = tuple[Tree, ...]


def literal(text: str) -> str:
    """A terminal that is this text."""
    # The one control character that JSON leaves as it is and Lark does not take.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def found_in(pattern: str, *, quoted: bool) -> str:
    """A terminal of the texts in which a pattern is found, as JSON schema's `pattern` means it.

    Raises:
        PatternError: the pattern cannot be read, or cannot be written.
    """
    return _search(parse(pattern), quoted)


def of_length(least: int, most: int | None, *, quoted: bool) -> str:
    """A terminal of all texts of so many characters."""
    bounds = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
    return f"/{ANY.expression(quoted=quoted)}{bounds}/"


def finite(pattern: str, most: int) -> list[str] | None:
    """The texts in which a pattern is found, if there are at most so many; None otherwise."""
    found: dict[str, None] = {}
    for items in _branches(parse(pattern)):
        if not items or not isinstance(items[0], Begin) or not isinstance(items[-1], End):
            return None
        texts = words(Sequence(items[1:-1]), most)
        if texts is None:
            return None
        found.update(dict.fromkeys(texts))
    return list(found) if len(found) <= most else None


def _search(tree: Tree, quoted: bool) -> str:
    return _either(_branch(items, quoted) for items in _branches(tree))


def _branch(items: _Items, quoted: bool) -> str:
    """A terminal of the texts in which one branch is found."""
    start, end = Repeat(ANY, 0, None), Repeat(ANY, 0, None)
    return _sequence((start, *items, end), quoted)


def _sequence(items: _Items, quoted: bool) -> str:
    """A terminal of the texts that are this sequence as a whole; anchors and what looks around stand in it."""
    for place, item in enumerate(items):
        before, after = items[:place], items[place + 1 :]
        match item:
            case Begin():
                return _sequence(after, quoted) if _may_be_empty(before, "^") else _NOTHING
            case End():
                # What stands behind may still look back, so only the end of it goes.
                return _sequence(before, quoted) if _may_be_empty(after, "$") else _NOTHING
    for place, item in enumerate(items):
        if not isinstance(item, Look):
            continue
        before, after = items[:place], items[place + 1 :]
        looked = _looked(item, quoted)
        if item.ahead:
            return _joined(_sequence(before, quoted), _both(looked, _sequence(after, quoted)))
        return _joined(_both(looked, _sequence(before, quoted)), _sequence(after, quoted))
    return _regex("".join(_expression(item, quoted) for item in items))


_NOTHING = "/[^\\x{0}-\\x{10FFFF}]/"


def _looked(look: Look, quoted: bool) -> str:
    """A terminal of what stands on that side, up to the end of the text or from its beginning."""
    any_text = Repeat(ANY, 0, None)
    sides = []
    for items in _branches(look.item):
        if look.ahead and any(isinstance(item, Begin) for item in items):
            raise PatternError("^ inside (?=…) or (?!…) is not supported")
        if not look.ahead and any(isinstance(item, End) for item in items):
            raise PatternError("$ inside (?<=…) or (?<!…) is not supported")
        sides.append(_sequence((*items, any_text) if look.ahead else (any_text, *items), quoted))
    found = _either(sides)
    return f"({of_length(0, None, quoted=quoted)} & ~{found})" if look.negated else found


def _may_be_empty(items: Iterable[Tree], anchor: str) -> bool:
    """True if a sequence can be the empty text, which it must be beside an anchor; nothing else can be said."""
    for item in items:
        match item:
            case Repeat(least=0) | Begin() | End():
                continue
            case Look():
                raise PatternError(f"what looks around beside {anchor} on its outer side is not supported")
            case Characters():
                return False
            case _ if _nullable(item):
                continue
            case _:
                return False
    return True


def _nullable(tree: Tree) -> bool:
    match tree:
        case Characters():
            return False
        case Sequence():
            return all(map(_nullable, tree.items))
        case Choice():
            return any(map(_nullable, tree.options))
        case Repeat():
            return tree.least == 0 or _nullable(tree.item)
    return True


def _branches(tree: Tree) -> list[_Items]:
    """The sequences of which a tree is the choice, so that what is not regular by itself stands at the top of them."""
    if not _special(tree):
        return [(tree,)]
    match tree:
        case Choice():
            found = [items for option in tree.options for items in _branches(option)]
        case Sequence():
            parts = [_branches(item) for item in tree.items]
            count = 1
            for part in parts:
                count *= len(part)
                _at_most(count)
            found = [tuple(item for items in chosen for item in items) for chosen in product(*parts)]
        case Repeat(least=0, most=1):
            found = [(), *_branches(tree.item)]
        case Repeat():
            raise PatternError("anchors and what looks around cannot stand in a repetition")
        case _:
            return [(tree,)]
    _at_most(len(found))
    return found


def _at_most(count: int) -> None:
    if count > _MOST_BRANCHES:
        raise PatternError(f"it has more than {_MOST_BRANCHES} alternatives with anchors")


def _special(tree: Tree) -> bool:
    match tree:
        case Begin() | End() | Look():
            return True
        case Sequence():
            return any(map(_special, tree.items))
        case Choice():
            return any(map(_special, tree.options))
        case Repeat():
            return _special(tree.item)
    return False


def _expression(tree: Tree, quoted: bool) -> str:
    match tree:
        case Characters():
            return tree.expression(quoted=quoted)
        case Sequence():
            return "".join(_expression(item, quoted) for item in tree.items)
        case Choice():
            return f"(?:{'|'.join(_expression(option, quoted) for option in tree.options)})"
        case Repeat():
            most = "" if tree.most is None else str(tree.most)
            return f"(?:{_expression(tree.item, quoted)}){{{tree.least},{most}}}"
    raise PatternError("anchors and what looks around cannot stand here")


def _regex(expression: str) -> str:
    # An empty literal would begin a comment.
    return f"/{expression}/" if expression else '""'


def _joined(left: str, right: str) -> str:
    return right if left == '""' else left if right == '""' else f"({left} {right})"


def _both(left: str, right: str) -> str:
    return f"({left} & {right})"


def _either(terminals: Iterable[str] | Iterator[str]) -> str:
    found = list(dict.fromkeys(terminals))
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"
