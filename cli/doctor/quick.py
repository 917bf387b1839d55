"""Checks that take milliseconds and look at this machine only: `temper up` makes them first.

What they need is imported quickly, too; the others are in registry.py.
"""

from __future__ import annotations

from cli.doctor.check import Check, examine
from cli.doctor.checks import disk, model, packages, security, settings
from cli.doctor.findings import Checked, Status
from cli.doctor.place import Place

PYTHON = (Check("python", packages.python), Check("packages", packages.required))
SETTINGS = (
    Check("settings", settings.readable),
    Check("settings.names", settings.known),
    Check("settings.private", settings.private),
)
MODEL = (Check("model", model.files),)
MACHINE = (Check("disk", disk.space), Check("disk.write", disk.writable), Check("keys", security.keys))

FIRST = (*PYTHON, *SETTINGS, *MODEL, *MACHINE)
"""All of them."""


def problems(place: Place, *, fetched: bool = True) -> list[Checked]:
    """What the quick checks find, the failures first.

    Args:
        fetched: the model is there already; else it is left out.
    """
    bad = [
        entry
        for entry in examine(place, [check for check in FIRST if fetched or check not in MODEL])
        if entry.finding.status in (Status.WARNING, Status.FAILURE)
    ]
    return sorted(bad, key=lambda entry: entry.finding.status is not Status.FAILURE)
