"""A key file for tests, and the form of refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from services.common.security.api_keys import ApiKey, KeyFile, Scope, dump_keys, new_entry, new_key
from tests.unit.gateway.conftest import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
NO_REDIS = SecretStr("redis://127.0.0.1:1/0")


class Keys:
    """A key file and the keys in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, ApiKey] = {}
        self.secrets: dict[str, str] = {}

    def add(self, name: str, *scopes: Scope, **more: Any) -> str:
        self.secrets[name] = new_key()
        self.entries[name] = new_entry(self.secrets[name], name=name, scopes=scopes, **more)
        self.write()
        return self.secrets[name]

    def change(self, name: str, **values: Any) -> None:
        self.entries[name] = self.entries[name].model_copy(update=values)
        self.write()

    def write(self) -> None:
        scratch = self.path.with_suffix(".new")
        scratch.write_bytes(dump_keys(KeyFile(keys=tuple(self.entries.values()))))
        scratch.replace(self.path)

    def bearer(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets[name]}"}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)
