"""A finding of a check, as `temper doctor` takes it over."""

from __future__ import annotations

from typing import Literal, TypedDict


class Finding(TypedDict):
    """Result of one check; the way out is empty where nothing is to do."""

    status: Literal["ok", "skipped", "warning", "failure"]
    message: str
    way_out: str


def ok(message: str) -> Finding:
    return Finding(status="ok", message=message, way_out="")


def skipped(message: str) -> Finding:
    return Finding(status="skipped", message=message, way_out="")


def warning(message: str, way_out: str) -> Finding:
    return Finding(status="warning", message=message, way_out=way_out)


def failure(message: str, way_out: str) -> Finding:
    return Finding(status="failure", message=message, way_out=way_out)
