"""Last lines of a process's log, kept in memory for those who may ask for them.

The log itself goes to standard error. What is kept here has the same fields, each cut to a length, behind the masks.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
MOST_LINES = 1000
"""Most lines of one answer."""
Plain: TypeAlias = str | int | float | bool | None
REQUEST_FIELDS = ("request_id", "completion_id", "request")
"""Fields that name the request that a line is about."""
_MESSAGE, _FIELD, _EXCEPTION = 4096, 1024, 8192
"""Most characters of a message, of the values of fields, and of a traceback, whose end is kept."""
_FIELDS = 24
_TIME = "timestamp"
_OWN = frozenset({"event", "level", "logger", "exception", "service", _TIME})


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    number: int
    """Number of the line in its process, from 1."""
    time: float
    """Seconds since 1970."""
    level: Level
    logger: str
    message: str
    fields: Mapping[str, Plain]
    exception: str
    """Traceback; empty: there is none."""

    @property
    def requests(self) -> frozenset[str]:
        """Requests that the line is about."""
        return frozenset(str(self.fields[name]) for name in REQUEST_FIELDS if self.fields.get(name))


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Lines that are asked for."""

    level: Level = "debug"
    """Least severe level."""
    text: str = ""
    """Text that a line has somewhere, in capitals or not."""
    requests: frozenset[str] = field(default_factory=frozenset)
    """Requests of which a line has to be about one; empty: all lines."""
    since: float = 0.0
    """Seconds since 1970."""
    limit: int = 200
    """Most lines; the newest are taken."""

    def wants(self, line: LogLine) -> bool:
        """Whether a line is asked for."""
        if line.time < self.since or LEVELS.index(line.level) < LEVELS.index(self.level):
            return False
        if self.requests and self.requests.isdisjoint(
            part for one in line.requests for part in (one, one.partition(":")[0])
        ):
            return False
        return not self.text or self.text.casefold() in _searched(line)


def _searched(line: LogLine) -> str:
    parts = (line.message, line.logger, *(f"{name}={value}" for name, value in line.fields.items()), line.exception)
    return "\n".join(parts).casefold()


class RecentLogs:
    """Ring of the last lines, filled on any thread. It is a processor of structlog, the last one before the renderer.

    Args:
        size: most lines; 0: none are kept.
    """

    def __init__(self, size: int = 0) -> None:
        self.process = secrets.token_hex(6)
        """New for each process: numbers of lines count from its start."""
        self._lines: deque[LogLine] = deque(maxlen=size)
        self._number = 0
        self._lock = threading.Lock()

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if self._lines.maxlen:
            others = [(key, value) for key, value in event.items() if key not in _OWN and not key.startswith("_")]
            fields = {_text(key): _plain(value) for key, value in others[:_FIELDS]}
            message, exception = _text(event.get("event", "")), _text(event.get("exception", ""))
            level, logger = _level(event.get("level")), _text(event.get("logger", ""))
            with self._lock:
                self._number += 1
                line = LogLine(
                    self._number, time.time(), level, logger, message[:_MESSAGE], fields, exception[-_EXCEPTION:]
                )
                self._lines.append(line)
        return event

    def find(self, query: LogQuery, after: int = 0) -> tuple[list[LogLine], int]:
        """Lines with higher numbers than ``after``, oldest first, and the number of the last line there is."""
        with self._lock:
            lines, last = list(self._lines), self._number
        found: list[LogLine] = []
        for line in reversed(lines):
            if line.number <= after or len(found) == query.limit:
                break
            if query.wants(line):
                found.append(line)
        return found[::-1], last


def _plain(value: Any) -> Plain:
    """The value, where JSON has it."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _text(value)[:_FIELD]


def _text(value: Any) -> str:
    """A text that every protocol takes: names of files may have what is no character."""
    return str(value).encode("utf-8", "replace").decode()


def _level(name: Any) -> Level:
    """The level, where loggers have more than these."""
    return next((level for level in LEVELS if level == name), "error" if name == "critical" else "info")
