"""Names of suites, data sets and policies in jobs: fields that are checked, and described as JSON Schema says them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from services.common.adapters.composition import COMPOSITION_SCHEMA, parse_composition
from services.common.adapters.names import BASE, POLICY_SCHEMA, parse_adapter_ref
from services.common.storage.names import check_name, field_check, version_number


def _versioned(kind: str) -> Callable[[str], None]:
    """Check of "name@n", or "name"."""

    def check(text: str) -> None:
        name, at, number = text.partition("@")
        check_name(name, kind)
        if at:
            version_number(number, kind)

    return check


def _policy(text: str) -> None:
    if text != BASE:
        parse_adapter_ref(text)


_VERSIONED = Field(json_schema_extra={"pattern": r"^(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@0*[1-9][0-9]{0,14})?$"})
SuiteRef = Annotated[str, field_check(_versioned("suite")), _VERSIONED]
""""name@n", or "name" for the newest version of a suite."""
DatasetRef = Annotated[str, field_check(_versioned("dataset")), _VERSIONED]
""""name@n", or "name" for the newest version of a data set."""


def _target(text: str) -> None:
    if text != BASE:
        parse_composition(text)


Policy = Annotated[str, field_check(_policy), Field(json_schema_extra=dict(POLICY_SCHEMA))]
""""base", "name@n", or "name" for the current version of an adapter."""
PolicyOrComposition = Annotated[str, field_check(_target), Field(json_schema_extra=dict(COMPOSITION_SCHEMA))]
"""The same, or several adapters together, "a@3*0.7+b"."""
