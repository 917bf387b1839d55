"""Settings by the names of their variables, and what is wrong with them."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

SHARED = frozenset({"aws_web_identity_token_file", "https_proxy", "http_proxy", "no_proxy"})
"""Settings that others read as well, by their names in the file of settings."""


def variable_named(key: str) -> str:
    """Variable of a setting by its name in the file: ours, or one that others read as well."""
    return key.upper() if key in SHARED else f"TEMPER_{key.upper()}"


def variable_of(name: str, field: FieldInfo) -> str:
    """Name of a setting in the environment."""
    alias = field.validation_alias
    return variable_named(alias if isinstance(alias, str) else name)


def keys_of(settings: type[BaseSettings]) -> dict[str, str]:
    """Names under which the file of settings has them → their variables."""
    return {
        field.validation_alias if isinstance(field.validation_alias, str) else name: variable_of(name, field)
        for name, field in settings.model_fields.items()
    }


def wrong_settings(error: ValidationError) -> list[str]:
    """A text a wrong setting, with the name of its variable and never its value."""
    return [
        f"{variable_named('_'.join(map(str, e['loc']))) if e['loc'] else 'settings'}: {_plain(e['msg'])}"
        for e in error.errors(include_input=False, include_url=False)
    ]


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ")
