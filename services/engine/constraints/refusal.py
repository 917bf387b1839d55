"""Why a grammar is not compiled."""

from __future__ import annotations


class Refused(Exception):
    """A grammar cannot be compiled; the message says why, for whoever sent it."""
