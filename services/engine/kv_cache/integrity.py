"""The one error of broken bookkeeping."""

from __future__ import annotations


class IntegrityError(RuntimeError):
    """Blocks, slots or sequences are leaked, shared or freed twice: a bug, never a user's fault."""
