"""Ids and paths of Tinker's API: sessions, training runs, samplers, checkpoints, and the requests to be waited for.

Clients take them as they are. A run's id is `{session}:train:{number}`: the SDK itself makes it of a session's id. What
has no record of its own says in its id all that there is to know, so that every gateway can answer.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic_core import from_json

from services.common.adapters.names import BASE, AdapterVersion, check_adapter_name, parse_adapter_ref
from services.common.errors import InvalidRequest, NotFound
from services.common.storage.ids import ulid
from services.common.storage.names import check_name, version_number

CheckpointKind: TypeAlias = Literal["weights", "sampler_weights"]
KINDS: tuple[CheckpointKind, ...] = ("weights", "sampler_weights")
SCHEME = "tinker://"
MOST_NAME = 36
"""Characters of a checkpoint's name: with the run's they are those of a checkpoint of a training session."""
_SESSION = r"tinker-[0-9a-z]{16}"
_RUN = re.compile(rf"({_SESSION}):train:(0|[1-9][0-9]{{0,3}})")
_SAMPLER = re.compile(rf"({_SESSION}):sample:(0|[1-9][0-9]{{0,8}}):([A-Za-z0-9._@-]{{1,90}})")


def new_session() -> str:
    """Id of a session; ids sort by the time they were made."""
    return f"tinker-{ulid()[:10]}{secrets.token_hex(3)}"


def check_session(session: str) -> str:
    """Raises NotFound if it is no session's id."""
    if re.fullmatch(_SESSION, session) is None:
        raise NotFound(f"no such session: {session[:80]!r}", param="session_id")
    return session


@dataclass(frozen=True, slots=True)
class RunId:
    """A training run: one adapter that is trained. Tinker calls it a model, too."""

    session: str
    number: int

    @classmethod
    def parse(cls, text: str) -> RunId:
        """Raises NotFound if it is no run's id."""
        match = _RUN.fullmatch(text)
        if match is None:
            raise NotFound(f"no such model: {text[:80]!r}", param="model_id")
        return cls(match.group(1), int(match.group(2)))

    def __str__(self) -> str:
        return f"{self.session}:train:{self.number}"

    @property
    def adapter(self) -> str:
        """Name of the adapter that gets the run's versions, unless the client chose another."""
        return f"{self.session}-{self.number}"

    def checkpoint(self, name: str) -> str:
        """Name of a checkpoint of training sessions."""
        return f"{self.session}.{self.number}.{name}"


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """`tinker://{run}/{kind}/{name}`, or `tinker://{adapter}/sampler_weights/{version}` of any adapter here."""

    run: RunId | None
    adapter: AdapterVersion | None
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        """Raises InvalidRequest, NotFound."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise InvalidRequest(
                f"path {text[:120]!r} must be tinker://<run>/weights/<name>, tinker://<run>/sampler_weights/<name> or "
                "tinker://<adapter>/sampler_weights/<version>",
                param="path",
            )
        owner, name = parts[0], check_checkpoint_name(parts[2])
        kind: CheckpointKind = "weights" if parts[1] == "weights" else "sampler_weights"
        if ":" in owner:
            return cls(RunId.parse(owner), None, kind, name)
        if kind == "weights":
            raise NotFound(f"{owner[:80]!r} is no training run, and only those have weights to train on", param="path")
        return cls(None, AdapterVersion(check_adapter_name(owner), version_number(name, "path")), kind, name)


def path_of(run: RunId, kind: CheckpointKind, name: str) -> str:
    """The path of a run's checkpoint."""
    return f"{SCHEME}{run}/{kind}/{name}"


def check_checkpoint_name(name: str) -> str:
    """Raises InvalidRequest if a checkpoint cannot have this name."""
    check_name(name, "checkpoint")
    if len(name) > MOST_NAME:
        raise InvalidRequest(
            f"checkpoint name {name[:80]!r} has {len(name)} characters and may have {MOST_NAME}: shorten it",
            param="path",
        )
    return name


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling session: the policy that answers. ``policy``: "base", "name@n", or "name" for its newest version."""

    session: str
    number: int
    policy: str

    @classmethod
    def parse(cls, text: str) -> Sampler:
        """Raises NotFound if it is no sampler's id."""
        match = _SAMPLER.fullmatch(text)
        if match is None:
            raise NotFound(f"no such sampling session: {text[:80]!r}", param="sampling_session_id")
        policy = match.group(3)
        try:
            if policy != BASE:
                parse_adapter_ref(policy)
        except InvalidRequest as error:
            raise NotFound(f"no such sampling session: {text[:80]!r}", param="sampling_session_id") from error
        return cls(match.group(1), int(match.group(2)), policy)

    def __str__(self) -> str:
        return f"{self.session}:sample:{self.number}:{self.policy}"

    @property
    def path(self) -> str | None:
        """Path of its weights; None: the base model, or weights that change."""
        if self.policy == BASE or "@" not in self.policy:
            return None
        name, version = parse_adapter_ref(self.policy)
        return f"{SCHEME}{name}/sampler_weights/{version}"


RequestKind: TypeAlias = Literal["made", "sample", "call", "loaded"]


@dataclass(frozen=True, slots=True)
class RequestId:
    """Request to be waited for: what it is about, and what its answer needs besides."""

    kind: RequestKind
    about: dict[str, Any]

    def __str__(self) -> str:
        packed = json.dumps([self.kind, self.about], separators=(",", ":"), sort_keys=True)
        return base64.urlsafe_b64encode(packed.encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> RequestId:
        """Raises NotFound if it is no request's id."""
        try:
            # Not json.loads, which recurses as deep as a client wants.
            kind, about = from_json(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except (ValueError, TypeError, binascii.Error) as error:
            raise NotFound(f"no such request: {text[:80]!r}", param="request_id") from error
        if kind not in ("made", "sample", "call", "loaded") or not isinstance(about, dict):
            raise NotFound(f"no such request: {text[:80]!r}", param="request_id")
        return cls(kind, about)
