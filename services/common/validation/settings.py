"""Settings by the names of their variables, and what is wrong with them."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings


def variable_of(name: str, field: FieldInfo) -> str:
    """Name of a setting in the environment: ours, or one that others read as well and that has its name from them."""
    alias = field.validation_alias
    return alias.upper() if isinstance(alias, str) else f"TEMPER_{name.upper()}"


def keys_of(settings: type[BaseSettings]) -> dict[str, str]:
    """Names under which the file of settings has them → their variables."""
    return {
        field.validation_alias if isinstance(field.validation_alias, str) else name: variable_of(name, field)
        for name, field in settings.model_fields.items()
    }


def wrong_settings(error: ValidationError) -> list[str]:
    """A text a wrong setting, with the name of its variable and never its value."""
    return [
        f"{'TEMPER_' + '_'.join(map(str, e['loc'])).upper() if e['loc'] else 'settings'}: {e['msg']}"
        for e in error.errors(include_input=False, include_url=False)
    ]
