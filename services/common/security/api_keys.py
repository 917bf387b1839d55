"""API keys at rest: the file that `temper keys` writes and the gateway reads.

```json
{"keys": [{"id": "k-5e0c6f1ab2d3", "name": "ci", "sha256": "<64 hex digits>", "scopes": ["inference", "train"],
           "limits": {"requests_per_minute": 600}, "created_at": "2026-01-31T12:00:00Z"}]}
```

Only a digest of a key is kept. A plain SHA-256, without salt or stretching, is enough because keys are 256 random bits,
never chosen by people: nobody can try them out, and no two are equal, so there is nothing for a salt to tell apart
(NIST SP 800-63B, section 5.1.2.2, asks for salt in look-up secrets below 112 bits only). It also lets a gateway find a
key by its digest in microseconds.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.common.errors import InvalidRequest

PREFIX = "tp-"
"""Prefix of every key, so that people and secret scanners recognise one."""
TINKER_PREFIX = "tml-"
"""Tinker's SDK sends no key without this prefix: a key may be given with it in front."""
PATTERN = r"\btp-[A-Za-z0-9_-]{43}"
"""A key in a text."""
KEY_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of the id that logs show for a key."""
ANONYMOUS = "anonymous"
"""Id of callers of a gateway without keys."""
MAX_FILE_BYTES = 16 * 2**20
MAX_PER_MINUTE = 100_000_000
"""Highest limit, so that the arithmetic of the limits stays exact in 53 bits: see
services/gateway/rate_limits/memory_limiter.py."""


class Scope(enum.StrEnum):
    """Permission of a key."""

    INFERENCE = "inference"
    """Completions and everything else that only uses the model."""
    TRAIN = "train"
    """Training jobs and sessions, and downloads of what they made."""
    ATTACH = "attach"
    """Changing what the base model's name answers: by a job or a session that attaches, by hand, and back."""
    ADMIN = "admin"
    """Changing adapters by hand: upload, attach, merge, roll back, delete. And everybody's jobs."""


def _aware(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError('a time needs its zone, as in "2026-01-31T12:00:00Z"')
    return moment


Moment = Annotated[datetime, AfterValidator(_aware)]
PerMinute = Annotated[int, Field(ge=0, le=MAX_PER_MINUTE)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class KeyLimits(_Strict):
    """Limits of one key. None: the gateway's default; 0: none."""

    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    """Prompts and completions together."""
    concurrent_requests: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


class ApiKey(_Strict):
    """One key, without the key."""

    id: str = Field(pattern=KEY_ID_PATTERN)
    """Id of the key in logs."""
    name: str = Field("", max_length=200)
    """Name of the key for people."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...]
    limits: KeyLimits = KeyLimits()
    log_share: float | None = Field(None, ge=0, le=1)
    """Share of the key's requests that the request log has, where that is on; None: the gateway's default."""
    created_at: Moment | None = None
    expires_at: Moment | None = None
    revoked_at: Moment | None = None

    @model_validator(mode="after")
    def _not_reserved(self) -> ApiKey:
        if self.id == ANONYMOUS:
            raise ValueError(f"the id {ANONYMOUS!r} is taken by callers without a key")
        return self

    def refusal(self, now: datetime) -> str | None:
        """Reason why the key is not valid; None: it is."""
        if self.revoked_at is not None and self.revoked_at <= now:
            return "has been revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "has expired"
        return None


class KeyFile(_Strict):
    """The whole file."""

    keys: tuple[ApiKey, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> KeyFile:
        for field in ("id", "sha256"):
            seen: set[str] = set()
            for number, key in enumerate(self.keys):
                value = getattr(key, field)
                if value in seen:
                    raise ValueError(f"keys[{number}] has the {field} of an earlier key")
                seen.add(value)
        return self


def new_key() -> str:
    """256 random bits behind the prefix."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """Digest that is kept of a key: lower-case hex SHA-256."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_entry(
    key: str,
    *,
    name: str,
    scopes: tuple[Scope, ...],
    limits: KeyLimits | None = None,
    expires_at: datetime | None = None,
) -> ApiKey:
    """The entry of a key made now."""
    return ApiKey(
        id=f"k-{secrets.token_hex(6)}",
        name=name,
        sha256=digest(key),
        scopes=scopes,
        limits=limits or KeyLimits(),
        created_at=datetime.now(UTC).replace(microsecond=0),
        expires_at=expires_at,
    )


def parse_keys(data: bytes) -> KeyFile:
    """Reads the file's content.

    Raises:
        InvalidRequest: what is wrong with it, without any value of it.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"the file is over {MAX_FILE_BYTES} bytes")
    try:
        return KeyFile.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_context=False, include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        raise InvalidRequest(f"{place}: {first['msg']}" if place else str(first["msg"])) from None


def dump_keys(file: KeyFile) -> bytes:
    """The file's content, an entry a line for people who compare versions."""
    lines = ",\n".join("  " + key.model_dump_json(exclude_none=True, exclude_defaults=True) for key in file.keys)
    return f'{{"keys": [\n{lines}\n]}}\n'.encode() if file.keys else b'{"keys": []}\n'
