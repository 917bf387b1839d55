"""JSON that others wrote, of a depth that every reader of what is kept of it takes."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

MOST_LEVELS = 128
"""Objects and lists in each other.

pydantic's parser takes 201. What is kept of a request has more levels than the request: a tool's schema in a message is
one further out than in the chat that it becomes, and a record that has one level too many is found out when it is read,
together with all that stands beside it.
"""
_AROUND = 201 - MOST_LEVELS


def parsed_json(text: bytes | str, *, allow_inf_nan: bool) -> Any:
    """The value of a JSON text. Invalid UTF-8, lone surrogates and endless numbers are refused.

    Args:
        allow_inf_nan: NaN and infinity are taken; whoever reads the value refuses them by their place.

    Raises:
        ValueError: it is no JSON, or nested more than MOST_LEVELS deep.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") <= MOST_LEVELS:
        return from_json(data, allow_inf_nan=allow_inf_nan)
    # With so many lists around it the parser's own limit is ours.
    try:
        value = from_json(b"[" * _AROUND + data + b"]" * _AROUND, allow_inf_nan=allow_inf_nan)
        for _ in range(_AROUND):
            (value,) = value
    except ValueError:
        raise ValueError(_reason(data, allow_inf_nan=allow_inf_nan)) from None
    return value


def _reason(data: bytes, *, allow_inf_nan: bool) -> str:
    """What is wrong with a text: in its own places, which it has without the lists around it."""
    try:
        from_json(data, allow_inf_nan=allow_inf_nan)
    except ValueError as error:
        if "recursion limit" not in str(error):
            return str(error)
    return f"it is nested more than {MOST_LEVELS} levels deep: flatten it"
