"""Names of suites and of their versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import WithJsonSchema

from services.common.storage.names import NAME_SCHEMA, check_name, field_check, version_number


def check_suite_name(name: str) -> str:
    """Returns the name if a suite may have it.

    Raises:
        InvalidRequest: it may not.
    """
    return check_name(name, "suite")


SuiteName = Annotated[str, field_check(check_suite_name), WithJsonSchema({"type": "string", **NAME_SCHEMA})]


@dataclass(frozen=True, slots=True, order=True)
class SuiteVersion:
    """An immutable version of a suite, written "name@n" with n ≥ 1."""

    name: str
    version: int

    def __post_init__(self) -> None:
        check_suite_name(self.name)
        if self.version < 1:
            raise ValueError(f"a version is at least 1, got {self.version}")

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def parse_suite_ref(text: str) -> tuple[str, int | None]:
    """Splits "name" or "name@n" into the name and the version (None: the newest).

    Raises:
        InvalidRequest: the name or the number is malformed.
    """
    name, at, number = text.partition("@")
    check_suite_name(name)
    return name, version_number(number, "suite") if at else None
