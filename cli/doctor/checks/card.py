"""torch, driver, card, memory plan and kernels, as services.card_check finds them in a process that has torch."""

from __future__ import annotations

from typing import Any

from cli.doctor.findings import Finding, Status, failure
from cli.doctor.place import CARD_MODULE, CardBroken, Place


def torch(place: Place) -> Finding:
    """torch is there, and its CUDA fits the driver."""
    try:
        return _finding(place.card["torch"])
    except CardBroken as error:
        return failure(str(error), f"`python -m {CARD_MODULE}` says more")


def limits(place: Place) -> Finding:
    """The device can run what the settings ask of it: number formats, kernels, Triton, the cache of kernels."""
    return _finding(place.card["device"])


def memory(place: Place) -> Finding:
    """Weights, caches, adapters and training fit the memory."""
    return _finding(place.card["memory"])


def kernel(place: Place) -> Finding:
    """A kernel compiles here and gives the numbers of its reference."""
    return _finding(place.card["kernel"])


def _finding(found: dict[str, Any]) -> Finding:
    return Finding(Status(found["status"]), found["message"], found["way_out"])
