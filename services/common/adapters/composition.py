"""Compositions: several adapters, each with a scale, that answer as one. docs/guides/adapters.md has the formula."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

from services.common.adapters.names import BASE, FREE, NUMBER, AdapterVersion, check_adapter_name, parse_adapter_ref
from services.common.errors import InvalidRequest

MAX_MEMBERS = 16
"""Most adapters of a composition."""
MIN_SCALE, MAX_SCALE = 1e-6, 100.0
"""Smallest and largest magnitude of a scale."""
MAX_TEXT = 2048
"""Characters of the longest composition: 16 names of 64, each with a version and a scale."""
_SCALE = r"-?(100(\.0{1,23})?|[1-9][0-9]?(\.[0-9]{1,23})?|0\.0{0,5}[1-9][0-9]{0,17})"
_MEMBER = rf"{FREE}({NUMBER})?(\*{_SCALE})?"
_FIXED = rf"{FREE}{NUMBER}(\*{_SCALE})?"
_MORE = MAX_MEMBERS - 1
COMPOSITION_SCHEMA: Mapping[str, Any] = {
    "maxLength": MAX_TEXT,
    "pattern": rf"^(base|{_MEMBER}(\+{_MEMBER}){{0,{_MORE}}})$",
}
"""JSON Schema of "base", one adapter, or a composition: "name", "name@n", "a@3*0.7+b"."""
FIXED_SCHEMA: Mapping[str, Any] = {
    "maxLength": MAX_TEXT,
    "pattern": rf"^(base|{_FIXED}(\+{_FIXED}){{0,{_MORE}}})$",
}
"""The same where every member has to name its version: what stays as it is for a whole job."""
TEACHER_SCHEMA: Mapping[str, Any] = {
    "maxLength": MAX_TEXT,
    "pattern": rf"^(base|checkpoint|{_FIXED}(\+{_FIXED}){{0,{_MORE}}})$",
}


@dataclass(frozen=True, slots=True)
class Member:
    """Adapter of a composition."""

    name: str
    version: int | None = None
    """Version number; None: the current one."""
    scale: float = 1.0
    """Factor of what the adapter adds."""

    def __post_init__(self) -> None:
        check_adapter_name(self.name)
        if self.scale == 0:
            raise InvalidRequest(
                f"the scale of {self.ref} is 0, so it would add nothing: leave it out", param="adapters"
            )
        if not MIN_SCALE <= abs(self.scale) <= MAX_SCALE:
            raise InvalidRequest(
                f"the scale of {self.name} is {self.scale:g}: its magnitude must be between {MIN_SCALE:g} and "
                f"{MAX_SCALE:g}",
                param="adapters",
            )

    @property
    def ref(self) -> str:
        """ "name" or "name@n"."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    def __str__(self) -> str:
        if self.scale == 1.0:
            return self.ref
        return f"{self.ref}*{format(Decimal(repr(self.scale)), 'f').removesuffix('.0')}"


@dataclass(frozen=True, slots=True)
class Composition:
    """Composition: the sum of what its members add, each times its scale. It does not depend on their order, so they
    are sorted: equal compositions are equal objects and texts, "a@3*0.7+b@1"."""

    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.members) <= MAX_MEMBERS:
            raise InvalidRequest(
                f"a composition has 1 to {MAX_MEMBERS} adapters, not {len(self.members)}: merge some of them into one "
                "(POST /v1/adapters/NAME/merge)",
                param="adapters",
            )
        ordered = sorted(self.members, key=lambda member: (member.name, member.version or 0, member.scale))
        object.__setattr__(self, "members", tuple(ordered))

    @classmethod
    def of(cls, members: Iterable[Member]) -> Composition:
        """Composition of what a request names. Raises InvalidRequest if it may name a version twice."""
        given = tuple(members)
        for number, one in enumerate(given):
            for other in given[:number]:
                if one.name == other.name and (one.version == other.version or None in (one.version, other.version)):
                    raise InvalidRequest(
                        f"{one.ref} is named twice (also as {other.ref}): name it once, with the scale that both have "
                        "together, or name two versions",
                        param="adapters",
                    )
        return cls(given)

    @property
    def single(self) -> Member | None:
        """The adapter, if it is one, as it is; None: there are several, or a scale."""
        return self.members[0] if len(self.members) == 1 and self.members[0].scale == 1.0 else None

    @property
    def fixed(self) -> bool:
        """True if every member names its version."""
        return all(member.version is not None for member in self.members)

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        """Versions of the members that name theirs, in the members' order."""
        return tuple(AdapterVersion(one.name, one.version) for one in self.members if one.version is not None)

    def fix(self, current: Mapping[str, int]) -> Composition | None:
        """The composition of the members' current versions; None: one of the names has none.

        Args:
            current: name → number of its current version.
        """
        numbers = [one.version or current.get(one.name) for one in self.members]
        if None in numbers:
            return None
        return Composition(
            tuple(Member(one.name, number, one.scale) for one, number in zip(self.members, numbers, strict=True))
        )

    def loosen(self, current: Mapping[str, int]) -> Composition:
        """The composition as clients name it: without the numbers of versions that are current."""
        return Composition(
            tuple(
                Member(one.name, None if current.get(one.name) == one.version else one.version, one.scale)
                for one in self.members
            )
        )

    def digest(self, digests: Iterable[str]) -> str:
        """Identity of the weights, for cache keys: SHA-256 over the members' digests and scales.

        Args:
            digests: of the members, in their order.
        """
        parts = sorted((digest, member.scale) for digest, member in zip(digests, self.members, strict=True))
        lines = "\n".join(f"{digest}*{scale!r}" for digest, scale in parts)
        return hashlib.sha256(f"temper composition\n{lines}".encode()).hexdigest()

    def __str__(self) -> str:
        return "+".join(str(member) for member in self.members)


Published: TypeAlias = AdapterVersion | Composition
"""What may answer by a name: a version, or a composition of versions."""


def parse_composition(text: str) -> Composition:
    """Composition of "name", "name@n", "name*scale", and of several of them with "+" between.

    Raises:
        InvalidRequest: it is malformed; says which part.
    """
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"the composition has {len(text)} characters, the limit is {MAX_TEXT}", param="adapter")
    return Composition.of(_member(part) for part in text.split("+"))


def _member(text: str) -> Member:
    ref, star, scale = text.partition("*")
    name, version = parse_adapter_ref(ref)
    if star and not re.fullmatch(_SCALE, scale, re.ASCII):
        raise InvalidRequest(
            f"the scale {scale[:40]!r} of {ref} must be a decimal number whose magnitude is between {MIN_SCALE:f} and "
            f"{MAX_SCALE:g}, as in {name}*0.7",
            param="adapter",
        )
    return Member(name, version, float(scale) if star else 1.0)


def parse_published(text: str) -> Published:
    """The version, or the composition of versions, that a text names, "name@n" or "a@3*0.7+b@1".

    Raises:
        InvalidRequest: it is malformed, or a member does not name its version.
    """
    composition = parse_composition(text)
    loose = next((member.name for member in composition.members if member.version is None), None)
    if loose is not None:
        raise InvalidRequest(f"{text[:80]!r} must name a version, as in {loose}@1", param="adapter")
    return composition.versions[0] if composition.single is not None else composition


def parse_policy(text: str) -> Published | None:
    """The same, or None for "base". Raises InvalidRequest."""
    return None if text == BASE else parse_published(text)


def versions_of(published: Published | None) -> tuple[AdapterVersion, ...]:
    """The versions that answer; none: the base does."""
    if published is None:
        return ()
    return published.versions if isinstance(published, Composition) else (published,)
