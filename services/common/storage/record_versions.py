"""Version numbers of what is kept in Redis and in the object store (docs/decisions/schema-versions.md).

Each kind of record carries the number of its schema, under the name `schema`. What has none was written by the first
release and is 1. A number that this release does not know is refused, and so is a field or a word in a record that is
read strictly: nothing is read as what it is not, and what is refused is not written again without what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from services.common.errors import NewerSchema

PassOver: TypeAlias = Callable[[str, str | None, NewerSchema], None]
"""Called for each document that a list leaves out because a later release wrote it: with its id, the API key that its
writer says it belongs to (None: it does not say so where this release looks), and what reading it raised."""

FIELD: Final = "schema"
_UNKNOWN: Final = frozenset({"extra_forbidden", "union_tag_invalid", "literal_error", "enum"})
"""Errors of what is not known, rather than wrong."""
_WAY_OUT: Final = "upgrade this service, engines before gateways"


def unknown_part(error: ValidationError) -> str | None:
    """Place of a field or a word that this release does not know, if that is an error of a record; None: the record is
    wrong otherwise."""
    for one in error.errors(include_url=False, include_input=False):
        if one["type"] in _UNKNOWN:
            return ".".join(str(part) for part in one["loc"]) or "its kind"
    return None


@contextmanager
def passing_over(pass_over: PassOver | None, document: str, key_id: str | None) -> Iterator[None]:
    """Around the reading of a document of a list: tells ``pass_over`` that a later release wrote it, and goes on.

    Raises:
        NewerSchema: a later release wrote it, and ``pass_over`` is None.
    """
    try:
        yield
    except NewerSchema as error:
        if pass_over is None:
            raise
        pass_over(document, key_id, error)


@dataclass(frozen=True, slots=True)
class Schema:
    """A kind of record and the number that this release writes; it reads all up to that."""

    kind: str
    version: int

    def check(self, found: object, what: str) -> None:
        """Accepts what this release can read.

        Args:
            found: the number in the record; None or "": there is none.
            what: the record, in the message.

        Raises:
            NewerSchema: a later release wrote it.
        """
        try:
            number = 1 if found is None or found == "" else int(str(found))
        except ValueError:
            number = 0
        if not 1 <= number <= self.version:
            raise NewerSchema(
                f"{what} has schema {str(found)[:20]} of {self.kind}, and this release knows up to {self.version}: it "
                f"was written by a later release; {_WAY_OUT}"
            )

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Around the validation of a record that is read strictly.

        Raises:
            NewerSchema: it has a field, or a word, that this release does not know.
        """
        try:
            yield
        except ValidationError as error:
            part = unknown_part(error)
            if part is None:
                raise
            raise NewerSchema(
                f"{what} has something that this release does not know at {part[:200]!r}, which knows up to schema "
                f"{self.version} of {self.kind}: it was written by a later release; {_WAY_OUT}"
            ) from error

    def stamped(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record with its number."""
        return {FIELD: self.version, **{name: value for name, value in record.items() if name != FIELD}}

    def unstamped(self, record: Mapping[str, Any], what: str) -> dict[str, Any]:
        """The record without its number, which is checked. Raises NewerSchema."""
        self.check(record.get(FIELD), what)
        return {name: value for name, value in record.items() if name != FIELD}


JOB: Final = Schema("jobs", 1)
"""The hash of a training job with its spec and its events; also a spec added straight to the stream."""
BATCH: Final = Schema("batches", 2)
"""The hash of a batch, and its parts in the object store. Message batches have 2; all others are still written as 1."""
MANIFEST: Final = Schema("adapter manifests", 1)
POINTER: Final = Schema("adapter pointers", 1)
"""CURRENT, attached/…, deleted/… and which number a job publishes as."""
CHECKPOINT: Final = Schema("job checkpoints", 1)
SESSION_CHECKPOINT: Final = Schema("session checkpoints", 1)
FILE: Final = Schema("files", 1)
RESPONSE: Final = Schema("stored responses", 1)
SUITE: Final = Schema("evaluation suites", 1)
EVALUATION: Final = Schema("evaluations", 1)
"""What a run of suites asks, and its result."""
TRAINING_HASHES: Final = Schema("training hashes", 1)
FEEDBACK: Final = Schema("feedback", 1)
LOGGED_REQUEST: Final = Schema("logged requests", 1)
DATASET: Final = Schema("data sets", 1)
CANARY: Final = Schema("canaries", 1)
WEBHOOK: Final = Schema("webhook deliveries", 1)
LEARNER: Final = Schema("learners", 1)
TINKER: Final = Schema("Tinker records", 1)
"""Sessions, runs and checkpoints of Tinker's API."""
