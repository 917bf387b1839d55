"""The lines of an input file: reading them from pieces, and finding what is wrong with them before anything runs."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.validation.json_text import RepeatedKey, parsed_json
from services.gateway.core.batch_queue import LineError

MAX_ERRORS = 100
"""Most errors that are told of one file."""
MAX_CUSTOM_ID = 512
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """Line with one request. ``number`` counts from 1 and includes empty lines, as in editors."""

    number: int
    custom_id: str
    body: Mapping[str, Any]


class LineSplitter:
    """Splits a file that comes in pieces into lines.

    Args:
        limit: bytes of a line.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""
        self._number = 0

    def feed(self, piece: bytes, *, last: bool) -> Iterator[tuple[int, bytes]]:
        """Lines that a piece completes, each with its number; empty ones are left out.

        Raises:
            LineTooLong: one is over the limit.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if last:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._number += 1
            if len(line) > self._limit:
                raise LineTooLong(self._number, self._limit)
            if self._number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # some editors on Windows write one
            if line.strip():
                yield self._number, line
        if len(self._rest) > self._limit:
            raise LineTooLong(self._number + 1, self._limit)


class LineTooLong(Exception):
    """Line that is too long to be read into memory."""

    def __init__(self, number: int, limit: int) -> None:
        super().__init__(number)
        self.error = LineError(
            code="line_too_long", line=number, message=f"the line is over the limit of {limit} bytes of a request"
        )


class LineRefused(Exception):
    """A line that is no request."""

    def __init__(self, error: LineError) -> None:
        super().__init__(error.message)
        self.error = error


def parse_line(number: int, text: bytes, endpoint: str) -> Line:
    """Request that a line holds. Raises LineRefused."""

    def refused(code: str, message: str, param: str | None = None) -> LineRefused:
        return LineRefused(LineError(code=code, message=message, line=number, param=param))

    try:
        # Lines are read as routes read bodies: NaN is left to the models, which name the field.
        value: Any = parsed_json(text, allow_inf_nan=True)
    except RepeatedKey as error:
        raise refused("repeated_key", str(error), error.place) from error
    except ValueError as error:
        hint = "; an array's objects are written one a line" if text.lstrip().startswith(b"[") else ""
        raise refused("invalid_json_line", f"the line is not valid JSON: {str(error)[:200]}{hint}") from error
    if not isinstance(value, dict):
        hint = ": write the array's objects one a line" if isinstance(value, list) else ""
        raise refused("invalid_json_line", f"the line must be a JSON object{hint}")
    for field in _FIELDS:
        if field not in value:
            raise refused("missing_required_parameter", f"Missing required parameter: {field!r}.", field)
    for field in value:
        if field not in _FIELDS:
            raise refused(
                "unknown_parameter",
                f"Unknown parameter: {field[:80]!r}. A line has the fields {', '.join(_FIELDS)}.",
                field[:80],
            )
    custom_id, body = value["custom_id"], value["body"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise refused(
            "invalid_custom_id", f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters", "custom_id"
        )
    if value["method"] != "POST":
        raise refused("invalid_method", "method must be 'POST'", "method")
    if value["url"] != endpoint:
        raise refused("mismatched_url", f"url must be the batch's endpoint, {endpoint!r}", "url")
    if not isinstance(body, dict):
        raise refused("invalid_body", "body must be a JSON object: the request", "body")
    for field in ("stream", "background"):
        if body.get(field) not in (None, False):
            raise refused(
                "invalid_body", f"{field} must be left out or false: results are written to a file", f"body.{field}"
            )
    return Line(number, custom_id, body)


class InputCheck:
    """Checks a file's lines, in order.

    Args:
        endpoint: of the batch.
        limit: requests of a batch.
    """

    def __init__(self, endpoint: str, limit: int) -> None:
        self._endpoint = endpoint
        self._limit = limit
        self._seen: dict[bytes, int] = {}
        self.total = 0
        self.errors: list[LineError] = []
        self.stopped = False
        """True when the rest of the file is not looked at: as many errors as are told were found, or a line is too
        long."""

    def take(self, lines: Iterator[tuple[int, bytes]]) -> None:
        """Checks some lines."""
        try:
            for number, text in lines:
                self._take(number, text)
                if len(self.errors) >= MAX_ERRORS:
                    self.stopped = True
                    return
        except LineTooLong as error:
            self.errors.append(error.error)
            self.stopped = True

    def finish(self) -> None:
        """Ends the check: a file without requests is an error."""
        if self.total == 0 and not self.errors:
            self.errors.append(LineError(code="empty_file", message="the input file has no requests"))

    def _take(self, number: int, text: bytes) -> None:
        self.total += 1
        if self.total == self._limit + 1:
            message = f"a batch may have {self._limit} requests: split the file"
            self.errors.append(LineError(code="too_many_requests", message=message, line=number))
        if self.total > self._limit:
            return
        try:
            line = parse_line(number, text, self._endpoint)
        except LineRefused as refused:
            self.errors.append(refused.error)
            return
        digest = hashlib.sha256(line.custom_id.encode()).digest()[:16]
        first = self._seen.setdefault(digest, number)
        if first != number:
            message = f"custom_id {line.custom_id[:80]!r} is that of line {first} as well: each needs one of its own"
            self.errors.append(LineError(code="duplicate_custom_id", message=message, line=number, param="custom_id"))
