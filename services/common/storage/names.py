"""Names that users choose and that become object keys, and references to numbered versions of what they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import AfterValidator

from services.common.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FREE = rf"(?!.*\.\.){_NAME.pattern}"
NAME_SCHEMA: Mapping[str, Any] = {"minLength": 1, "maxLength": 64, "pattern": f"^{_FREE}$"}
REF_SCHEMA: Mapping[str, Any] = {"minLength": 1, "pattern": f"^{_FREE}(@0*[1-9][0-9]{{0,14}})?$"}
"""The same of "name" or "name@n"."""


def check_name(name: str, kind: str) -> str:
    """Returns the name if it is safe as one path segment of an object key and a URL.

    Args:
        kind: noun of what is named, and the field at fault.

    Raises:
        InvalidRequest: it is not.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidRequest(
            f"{kind} name {name[:80]!r} must be 1 to 64 letters, digits, '.', '_' or '-', start with a letter or digit"
            " and not contain '..'",
            param=kind,
        )
    return name


def version_number(text: str, kind: str) -> int:
    """Number behind the @ of "name@n".

    Raises:
        InvalidRequest: it is none.
    """
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 2**53:
        raise InvalidRequest(f"{kind} version {text[:40]!r} must be a positive number", param=kind)
    return int(text)


def field_check(check: Callable[[str], object]) -> AfterValidator:
    """A check that raises InvalidRequest, for a field of a request: pydantic takes ValueError."""

    def checked(text: str) -> str:
        try:
            check(text)
        except InvalidRequest as error:
            raise ValueError(error.message) from error
        return text

    return AfterValidator(checked)
