"""Refusal of a grammar that cannot be compiled."""

from __future__ import annotations


class Refused(Exception):
    """Refusal of a grammar that cannot be compiled; the message tells the client why.

    Args:
        message: reason.
        field: request field, if it is not that of the constraint.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
