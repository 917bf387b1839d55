"""State of an agent's conversation: what is sent with each request, saved and loaded."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.output import CliError, ExitCode

SYSTEM = (
    "You work in a directory of the user's computer. Use the tools to look at files, to change them and to run "
    "programs; look before you answer. When the task is done, say briefly what you did."
)
_FORMAT = 1


@dataclass(slots=True)
class Conversation:
    """Messages and sampling of a session. The system message stays the first one and never changes, so that each
    request begins with the tokens of the one before."""

    model: str
    system: str = SYSTEM
    adapter: str | None = None
    session: str = field(default_factory=lambda: f"agent-{uuid.uuid4().hex}")
    options: dict[str, Any] = field(default_factory=dict)
    """More fields of a request: temperature, max_tokens, …"""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Messages behind the system message."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def request(self, definitions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Fields of a request but for its messages."""
        body = {"model": self.model, "session_id": self.session, **self.options}
        if self.adapter is not None:
            body["adapter"] = self.adapter
        if definitions:
            body["tools"] = list(definitions)
        return body

    def save(self, file: Path) -> None:
        """Writes all of it as JSON. Raises CliError."""
        data = {
            "format": _FORMAT,
            "model": self.model,
            "system": self.system,
            "adapter": self.adapter,
            "session": self.session,
            "options": self.options,
            "turns": self.turns,
        }
        try:
            file.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            raise CliError(f"{file}: {error.strerror}", ExitCode.USAGE) from error

    @classmethod
    def load(cls, file: Path) -> Conversation:
        """What `save` wrote. Raises CliError."""
        try:
            data = json.loads(file.read_text())
        except OSError as error:
            raise CliError(f"{file}: {error.strerror}", ExitCode.USAGE) from error
        except ValueError as error:
            raise CliError(f"{file} is not JSON: {error}", ExitCode.USAGE) from error
        if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
            raise CliError(f"{file} is not what /save writes", ExitCode.USAGE)
        turns = data.get("turns")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
            raise CliError(f"{file} is not what /save writes: it has no turns", ExitCode.USAGE)
        try:
            return cls(**data)
        except TypeError as error:
            raise CliError(f"{file} is not what /save writes: {error}", ExitCode.USAGE) from error
