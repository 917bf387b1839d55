"""Enrolment of requests in a canary: which arm one belongs to, and an id that tells it.

A session stays in its arm, else a user does, else chance decides: by a hash with the canary's key, so that nobody can
choose an arm. The id of an answer ends with a tag, a keyed hash of the arm and the random digits before it. So whose
answer an opinion is about is read off its id: nothing is stored, however many answers there are, and nobody can make
up an id that counts. A session has no such tag: which ones had an answer is remembered until the canary ends.
"""

from __future__ import annotations

import re
import secrets
import uuid
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from services.learning.canaries.record import ARMS, Arm
from services.learning.canaries.store import Route

_TAG_BYTES: Final = 6
_RANDOM_BYTES: Final = 16 - _TAG_BYTES
_TAGGED = re.compile(rf"[a-z]+[-_]([0-9a-f]{{{2 * _RANDOM_BYTES}}})([0-9a-f]{{{2 * _TAG_BYTES}}})(?::\d+)?")
_BETWEEN = "\0"


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Part of one request in a canary."""

    route: Route
    arm: Arm
    session: str | None = None
    """See session_mark; None: the request had no session."""

    @property
    def version(self) -> str:
        """Version that answers: "name@n", or "base"."""
        return self.route.candidate if self.arm == "candidate" else self.route.current

    @property
    def header(self) -> str:
        """Value of the header that tells it."""
        return f"{self.route.id}; arm={self.arm}"


def enrol(route: Route, owner: str, session: str | None, user: str | None) -> Enrolment:
    """Draws the arm of a request.

    Args:
        owner: id of the API key, whose sessions and users are its own.
    """
    if session is not None:
        return Enrolment(route, arm_of_session(route.key, route.share, owner, session), session_mark(owner, session))
    if user is not None:
        return Enrolment(route, _arm(route.key, route.share, owner, "user", user))
    return Enrolment(route, "candidate" if secrets.randbelow(2**32) < route.share * 2**32 else "current")


def arm_of_session(key: str, share: float, owner: str, session: str) -> Arm:
    """Arm of all requests of a session."""
    return _arm(key, share, owner, "session", session)


def session_mark(owner: str, session: str) -> str:
    """Digest by which it is remembered that a session has had an answer of a canary."""
    return blake2b(_BETWEEN.join((owner, session)).encode(), person=b"temper session", digest_size=9).hexdigest()


def answer_digits(enrolment: Enrolment | None) -> str:
    """The 32 hex digits of an answer's id, random ones."""
    if enrolment is None:
        return uuid.uuid4().hex
    digits = secrets.token_hex(_RANDOM_BYTES)
    return digits + _tag(enrolment.route.key, enrolment.arm, digits)


def arm_of_answer(key: str, answer_id: str) -> Arm | None:
    """Arm of an answer, or of one of its choices, by its id; None: it is not of this canary."""
    found = _TAGGED.fullmatch(answer_id)
    if found is None:
        return None
    return next((arm for arm in ARMS if secrets.compare_digest(_tag(key, arm, found[1]), found[2])), None)


def _arm(key: str, share: float, *unit: str) -> Arm:
    digest = blake2b(_BETWEEN.join(unit).encode(), key=bytes.fromhex(key), person=b"temper arm", digest_size=8)
    return "candidate" if int.from_bytes(digest.digest()) < share * 2**64 else "current"


def _tag(key: str, arm: Arm, digits: str) -> str:
    said = f"{arm}{_BETWEEN}{digits}".encode()
    return blake2b(said, key=bytes.fromhex(key), person=b"temper answer id", digest_size=_TAG_BYTES).hexdigest()
