"""Names that users choose and that become object keys: adapters and their versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import WithJsonSchema

from services.common.errors import InvalidRequest
from services.common.storage.names import check_name, field_check, version_number

BASE = "base"
"""Reserved: the model without an adapter."""


def check_adapter_name(name: str) -> str:
    """Returns the name if it is safe as one path segment of an object key and a URL.

    Raises:
        InvalidRequest: it is not.
    """
    if "+" in name or "*" in name:
        raise InvalidRequest(
            f"{name[:80]!r} is several adapters, or one with a scale, and what is named here is one as it is: give "
            "one, or merge them into one (POST /v1/adapters/NAME/merge)",
            param="adapter",
        )
    check_name(name, "adapter")
    if name == BASE:
        raise InvalidRequest(f"adapter name {BASE!r} is reserved for the model without an adapter", param="adapter")
    return name


NAME_SCHEMA: Mapping[str, Any] = {
    "minLength": 1,
    "maxLength": 64,
    "pattern": r"^(?!base$)(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]*$",
}
"""Names that ``check_adapter_name`` accepts, as JSON Schema says it: for descriptions, the check has the better
messages."""
FREE = r"(?!base([@*+]|$))(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NUMBER = r"@0*[1-9][0-9]{0,14}"
POLICY_SCHEMA: Mapping[str, Any] = {"pattern": f"^(base|{FREE}({NUMBER})?)$"}
"""The same of "name", "name@n" or "base"."""
VERSION_SCHEMA: Mapping[str, Any] = {"pattern": f"^{FREE}{NUMBER}$"}
"""The same of "name@n"."""
AdapterName = Annotated[str, field_check(check_adapter_name), WithJsonSchema({"type": "string", **NAME_SCHEMA})]


@dataclass(frozen=True, slots=True, order=True)
class AdapterVersion:
    """An immutable version, written "name@n" with n ≥ 1."""

    name: str
    version: int

    def __post_init__(self) -> None:
        check_adapter_name(self.name)
        if self.version < 1:
            raise InvalidRequest(f"adapter version must be at least 1, got {self.version}", param="adapter")

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def parse_adapter_ref(text: str) -> tuple[str, int | None]:
    """Splits "name" or "name@n" into the name and the version (None: the current one).

    Raises:
        InvalidRequest: the name or the number is malformed.
    """
    name, at, number = text.partition("@")
    check_adapter_name(text if "+" in text or "*" in text else name)
    if not at:
        return name, None
    return name, version_number(number, "adapter")


_REF_SCHEMA = {"type": "string", "pattern": f"^{FREE}({NUMBER})?$"}
AdapterRef = Annotated[str, field_check(parse_adapter_ref), WithJsonSchema(_REF_SCHEMA)]
""""name" or "name@n"."""


def parse_adapter_version(text: str) -> AdapterVersion:
    """Version of "name@n".

    Raises:
        InvalidRequest: the name or the number is malformed or missing.
    """
    name, number = parse_adapter_ref(text)
    if number is None:
        raise InvalidRequest(f"{text[:80]!r} must name a version, as in {name}@1", param="adapter")
    return AdapterVersion(name, number)
