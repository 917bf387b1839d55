"""Secrets in what is told of a process: masked by the names of fields, by their forms, and by the settings' values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr
from pydantic_settings import BaseSettings

from services.common.security import api_keys

_SECRET = re.compile(r"secret|password|passwd|authorization|api_?key|access_key|token$|redis_url", re.IGNORECASE)
_API_KEY = re.compile(api_keys.PATTERN)
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s@]+@")
_SHORTEST = 8
"""Characters: a shorter value of a setting is not looked for, because it may be a word."""
_MASK = "***"


def mask_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Masks values whose key looks like a credential, API keys inside texts, and passwords inside URLs."""
    for key, value in event.items():
        event[key] = _MASK if _SECRET.search(key) else _texts(value, _mask_forms)
    return event


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value of a line with its texts changed, however deep they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _texts(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_texts(one, change) for one in value]
    return value


def _mask_forms(text: str) -> str:
    if api_keys.PREFIX in text:
        text = _API_KEY.sub(f"{api_keys.PREFIX}{_MASK}", text)
    return _URL_PASSWORD.sub(rf"\1:{_MASK}@", text) if "://" in text else text


class MaskValues:
    """Masks the secrets that settings hold wherever their values are in a text: a message of a library, a traceback.

    Args:
        settings: of the process. A default is no secret, and the parts of a value (the password of a URL, the keys of
            a list of them) are secrets by themselves.
    """

    def __init__(self, *settings: BaseSettings) -> None:
        found = {part for one in settings for part in _secrets_of(one) if len(part) >= _SHORTEST}
        longest_first = sorted(found, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, longest_first))) if found else None

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if self._values is not None:
            for key, value in event.items():
                event[key] = _texts(value, self._mask)
        return event

    def _mask(self, text: str) -> str:
        return text if self._values is None else self._values.sub(_MASK, text)


def _secrets_of(settings: BaseSettings) -> Iterator[str]:
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if not isinstance(value, SecretStr) or value == info.default:
            continue
        text = value.get_secret_value()
        yield text
        for pair in text.split(","):
            yield pair.partition("=")[2].strip()
        try:
            password = urlsplit(text).password or ""
        except ValueError:
            continue
        yield password
        yield unquote(password)
