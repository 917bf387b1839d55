"""Names of suites, data sets and policies in jobs: fields that are checked, and described as JSON Schema says them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from services.common.adapters.composition import COMPOSITION_SCHEMA, FIXED_SCHEMA, parse_composition, parse_policy
from services.common.adapters.names import BASE
from services.common.storage.names import check_name, field_check, version_number


def _versioned(kind: str) -> Callable[[str], None]:
    """Check of "name@n", or "name"."""

    def check(text: str) -> None:
        name, at, number = text.partition("@")
        check_name(name, kind)
        if at:
            version_number(number, kind)

    return check


_VERSIONED = Field(json_schema_extra={"pattern": r"^(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@0*[1-9][0-9]{0,14})?$"})
SuiteRef = Annotated[str, field_check(_versioned("suite")), _VERSIONED]
""""name@n", or "name" for the newest version of a suite."""
DatasetRef = Annotated[str, field_check(_versioned("dataset")), _VERSIONED]
""""name@n", or "name" for the newest version of a data set."""


def _policy(text: str) -> None:
    if text != BASE:
        parse_composition(text)


Policy = Annotated[str, field_check(_policy), Field(json_schema_extra=dict(COMPOSITION_SCHEMA))]
""""base", "name@n", "name" for the current version of an adapter, or several together, "a@3*0.7+b"."""
FixedPolicy = Annotated[str, field_check(parse_policy), Field(json_schema_extra=dict(FIXED_SCHEMA))]
"""The same where every adapter has to name its version: what stays as it is for a whole job."""
