"""Why a grammar is not compiled."""

from __future__ import annotations


class Refused(Exception):
    """A grammar cannot be compiled; the message says why, for whoever sent it.

    Args:
        message: why.
        field: of the request, if it is known better than by the constraint.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
