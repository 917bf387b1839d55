"""Temper's own version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Version of the installed package; "unknown" in a source tree that is not installed."""
    try:
        return version("temper")
    except PackageNotFoundError:
        return "unknown"
