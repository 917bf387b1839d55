"""JSON that others wrote, of a depth that every reader of what is kept of it takes."""

from __future__ import annotations

import json
from typing import Any, Final

import jiter
from pydantic_core import from_json

from services.common.validation.errors import dotted

MOST_LEVELS = 128
"""Objects and lists in each other.

pydantic's parser takes 201. What is kept of a request has more levels than the request: a tool's schema in a message is
one further out than in the chat that it becomes, and a record that has one level too many is found out when it is read,
together with all that stands beside it.
"""
_AROUND: Final = 201 - MOST_LEVELS


class RepeatedKey(ValueError):
    """An object has a key twice. Readers differ in which of the values counts: what one has checked, another may not
    see.

    Args:
        place: of the second one, as "messages[0].role".
    """

    def __init__(self, place: str) -> None:
        super().__init__(f"{place or 'the empty key'} is there twice: leave one of them out")
        self.place = place


class _Members(list[tuple[str, Any]]):
    """Keys and values of an object as they stand in its text."""


def parsed_json(text: bytes | str, *, allow_inf_nan: bool) -> Any:
    """The value of a JSON text. Invalid UTF-8, lone surrogates, endless numbers and repeated keys are refused.

    Args:
        allow_inf_nan: NaN and infinity are taken; whoever reads the value refuses them by their place.

    Raises:
        RepeatedKey: an object has a key twice.
        ValueError: it is no JSON, or nested more than MOST_LEVELS deep.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    # With so many lists around it the parser's own limit is ours.
    around = _AROUND if data.count(b"[") + data.count(b"{") > MOST_LEVELS else 0
    try:
        # pydantic's parser, which as it is in pydantic_core takes the last of several values.
        value = jiter.from_json(
            b"[" * around + data + b"]" * around if around else data,
            allow_inf_nan=allow_inf_nan,
            catch_duplicate_keys=True,
        )
        for _ in range(around):
            (value,) = value
    except ValueError:
        raise _reason(data, allow_inf_nan=allow_inf_nan) from None
    return value


def _reason(data: bytes, *, allow_inf_nan: bool) -> ValueError:
    """What is wrong with a text: in its own places, which it has without the lists around it."""
    try:
        from_json(data, allow_inf_nan=allow_inf_nan)
    except ValueError as error:
        if "recursion limit" not in str(error):
            return error
    else:
        if (place := _repeated(json.loads(data, object_pairs_hook=_Members))) is not None:
            return RepeatedKey(place)
    return ValueError(f"it is nested more than {MOST_LEVELS} levels deep: flatten it")


def _repeated(document: Any) -> str | None:
    """Place of a key that an object has had before; None: there is none."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _Members):
            seen: set[str] = set()
            for key, _ in value:
                if key in seen:
                    return dotted((*path, key))
                seen.add(key)
            waiting.extend(((*path, key), inner) for key, inner in value)
        elif isinstance(value, list):
            waiting.extend(((*path, index), inner) for index, inner in enumerate(value))
    return None
