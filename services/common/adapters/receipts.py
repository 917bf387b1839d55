"""Receipts: what a job made a version of, signed, in a file beside the version.

The file is {"receipt": …, "signature": …}. What is signed is the receipt as canonical JSON, so that the file may be
written in any layout. A receipt has no rows of the data, only their digest: whoever is erased from a data set is not
in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, ValidationError

from services.common.errors import CheckpointRejected
from services.common.security.signature import check_signature, signed

FORMAT = 1
DATA_FIELDS = frozenset(
    {"examples", "eval_examples", "prompt", "completions", "rewards", "truncated", "temperature", "groups", "rollouts"}
    | {"prompts", "eval_prompts"}
)
"""Fields of jobs that are data, at the top or in `generate`."""
_NOT_TOLD = frozenset({"webhook", "metadata", "dry_run"})
"""Fields that do not matter for the result, and may be private."""


class _Part(BaseModel):
    """Part of a receipt: what readers rely on, of what it has."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Named(_Part):
    name: str


class _Base(_Named):
    digest: str


class _Parent(_Part):
    version: str
    digest: str


class _Version(_Part):
    version: str


class _Data(_Part):
    sha256: str
    dataset: _Version | None


class _Job(_Part):
    id: str | None
    attempt: int
    spec: dict[str, Any]


class _Code(_Part):
    temper: str
    sources_sha256: str


class _Device(_Named):
    type: str


class _Content(_Part):
    version: str
    digest: str
    files: dict[str, str]
    base: _Base
    parents: list[_Parent]
    data: _Data
    job: _Job
    seeds: dict[str, int]
    settings: dict[str, int | float]
    code: _Code
    libraries: dict[str, str]
    kernels: str
    device: _Device


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt as it was read, with its signature."""

    content: Mapping[str, Any]
    signature: Mapping[str, Any] | None
    """None: the trainer had no key."""

    @classmethod
    def read(cls, data: bytes) -> Receipt:
        """Raises CheckpointRejected: it is malformed, or of a later format."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointRejected(f"it is no receipt: {error!r}") from error
        return cls.of(document)

    @classmethod
    def of(cls, document: Any) -> Receipt:
        """A receipt that was read as JSON. Raises as read()."""
        try:
            content, signature = dict(document["receipt"]), document["signature"]
            signature = None if signature is None else dict(signature)
            canonical(content)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointRejected(f"it is no receipt: {error!r}") from error
        if content.get("format") != FORMAT:
            raise CheckpointRejected(
                f"the receipt has format {content.get('format')!r}, and {FORMAT} is known here: read it with the "
                "release that wrote it"
            )
        try:
            _Content.model_validate(content)
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, wrong["loc"]))
            raise CheckpointRejected(f"it is no receipt: {place}: {wrong['msg']}") from error
        return cls(content, signature)

    @classmethod
    def sign(cls, content: Mapping[str, Any], key: Ed25519PrivateKey | None) -> Receipt:
        """A receipt with its signature, if there is a key."""
        return cls(content, None if key is None else json.loads(signed(canonical(content), key)))

    def to_bytes(self) -> bytes:
        """Contents of the file."""
        document = {"receipt": self.content, "signature": self.signature}
        return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def check(self, key: Ed25519PublicKey) -> None:
        """Returns if it is signed with the key. Raises CheckpointRejected: it is not, and why."""
        if self.signature is None:
            raise CheckpointRejected("the receipt is not signed: the trainer had no key (TEMPER_RECEIPT_KEY_FILE)")
        check_signature(canonical(self.content), json.dumps(dict(self.signature)).encode(), key)


def canonical(content: Any) -> bytes:
    """Canonical JSON: equal contents are equal bytes."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(content: Any) -> str:
    """Hex sha256 of the canonical JSON."""
    return hashlib.sha256(canonical(content)).hexdigest()


def parted(spec: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job without its data, and its data alone.

    Args:
        spec: the JSON of a job.
    """
    data = {name: value for name, value in spec.items() if name in DATA_FIELDS}
    kept = {name: value for name, value in spec.items() if name not in DATA_FIELDS | _NOT_TOLD}
    made = kept.get("generate")
    if isinstance(made, Mapping):
        data["generate"] = {name: value for name, value in made.items() if name in ("prompts", "eval_prompts")}
        kept["generate"] = {name: value for name, value in made.items() if name not in data["generate"]}
    return kept, data


def joined(kept: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The job that `parted` took apart."""
    whole = {**kept, **{name: value for name, value in data.items() if name != "generate"}}
    if "generate" in data and isinstance(kept.get("generate"), Mapping):
        whole["generate"] = {**kept["generate"], **data["generate"]}
    return whole
