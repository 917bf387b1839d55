"""Redaction: what a request log leaves out, and what it replaces, before anything is written.

```toml
leave_out = ["token_ids", "logprobs", "metadata.email"]

[patterns]
email = '[\\w.+-]+@[\\w-]+\\.[\\w.-]+'
```

A pattern (RE2 syntax) is looked for in all text of messages, tools, prompts, answers and metadata, and in the names of
users and sessions; what it finds becomes "[email]". Token ids and log-probabilities of such a request are left out,
because they say the same.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from services.common.errors import InvalidRequest

TOKENS: Final = ("token_ids", "logprobs")
"""What of a request says its text in another way."""
PARTS: Final = ("messages", "tools", "prompt", "answers", "sampling", "user", "session", "metadata", *TOKENS)
"""Names that `leave_out` knows; "metadata.NAME" is one entry of the metadata."""
_TEXTS = ("messages", "tools", "prompt", "user", "session", "metadata", "sampling")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    leave_out: list[str] = []
    patterns: dict[str, str] = {}

    @field_validator("leave_out")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in PARTS and not name.startswith("metadata."):
                raise ValueError(f"{name!r} is no part of a logged request: {', '.join(PARTS)} or metadata.NAME")
        return names


@dataclass(frozen=True, slots=True)
class Redaction:
    """Rules of what is not logged."""

    leave_out: frozenset[str] = frozenset()
    patterns: Mapping[str, Any] = field(default_factory=dict)
    """Compiled patterns by name."""

    @classmethod
    def read(cls, file: Path) -> Redaction:
        """The rules of a file. Raises InvalidRequest."""
        try:
            found = _File.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{file} is not TOML: {error}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"{file}: {place}: {first['msg'].removeprefix('Value error, ')}") from error
        patterns = {name: _compiled(file, name, text) for name, text in found.patterns.items()}
        return cls(frozenset(found.leave_out), patterns)

    def apply(self, record: dict[str, Any]) -> None:
        """Changes a record that is about to be written."""
        for name in self.leave_out:
            _leave_out(record, name)
        if not self.patterns:
            return
        found: set[str] = set()
        for name in _TEXTS:
            if record.get(name) is not None:
                record[name] = self._replaced(record[name], found)
        for choice in record["choices"]:
            if choice.get("message") is not None:
                choice["message"] = self._replaced(choice["message"], found)
        if found:
            record["redacted"] = sorted(found)
            for name in TOKENS:
                _leave_out(record, name)

    def _replaced(self, value: Any, found: set[str]) -> Any:
        if isinstance(value, str):
            for name, pattern in self.patterns.items():
                replaced, count = pattern.subn(f"[{name}]", value)
                if count:
                    found.add(name)
                    value = replaced
            return value
        if isinstance(value, Mapping):
            return {self._replaced(key, found): self._replaced(entry, found) for key, entry in value.items()}
        if isinstance(value, Sequence):
            return [self._replaced(entry, found) for entry in value]
        return value


def _leave_out(record: dict[str, Any], name: str) -> None:
    if name.startswith("metadata."):
        if record.get("metadata"):
            record["metadata"] = {key: value for key, value in record["metadata"].items() if f"metadata.{key}" != name}
        return
    if name == "answers":
        for choice in record["choices"]:
            choice["message"] = None
        return
    if name == "token_ids":
        record["prompt_token_ids"] = None
    if name in TOKENS:
        for choice in record["choices"]:
            choice[name] = None
        return
    record[name] = None


def _compiled(file: Path, name: str, text: str) -> Any:
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        raise InvalidRequest(f"{file}: patterns.{name} is no expression of RE2: {error}") from error
