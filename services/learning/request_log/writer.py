"""Writer of the request log: takes recordings from the event loop, and never holds it up.

One thread makes lines of them and appends those to the spool, ten times a second: to wake it for each request costs
more than its line. Meanwhile the event loop waits for it, so it works for a moment at a time. Another thread hands
complete parts on to the object store and to the index. What finds no room is dropped and counted: a log entry is worth
less than a request.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog
from pydantic_core import to_json

from services.common.errors import TemperError, Unavailable
from services.common.storage.record_versions import LOGGED_REQUEST
from services.learning.request_log.index import Entry, RequestIndex
from services.learning.request_log.log import RequestLog
from services.learning.request_log.parts import Line, Parts
from services.learning.request_log.recording import Recording
from services.learning.request_log.redaction import Redaction
from services.learning.request_log.spool import Spool, SpooledPart

_WAITING_TOKENS = 2**22
"""Tokens of recordings that wait for the first thread, at most: some hundred MB, with their texts."""
_GATHER_SECONDS = 0.1
"""What came in this time is written together; a gateway that is killed loses as much."""
_AT_ONCE = 8
"""Lines that are made in one go, some 0.3 ms."""
_PAUSE_SECONDS = 0.005
"""Time that the event loop has to itself between two goes."""
_RETRY_SECONDS = 1.0
_SWEEP_SECONDS = 3600.0
log = structlog.get_logger(__name__)


class RequestLogWriter:
    """Writes recordings. ``take`` is for the event loop; it returns at once.

    Args:
        parts: parts in the object store.
        index: where requests are found.
        spool: parts on the disk.
        redaction: what is left out.
        part_seconds: time for which a part gathers requests.
        keep_seconds: age at which parts go, by whole days.
        written: counts what the spool has taken.
        dropped: counts what was left out, by reason: "queue", "spool", "disk" or "error".
    """

    def __init__(
        self,
        parts: Parts,
        index: RequestIndex,
        spool: Spool,
        redaction: Redaction,
        *,
        part_seconds: float,
        keep_seconds: float,
        written: Callable[[int], None],
        dropped: Callable[[str, int], None],
    ) -> None:
        self._parts = parts
        self._index = index
        self._spool = spool
        self._redaction = redaction
        self._part_seconds = part_seconds
        self._keep_seconds = keep_seconds
        self._written = written
        self._dropped = dropped
        self._queue: queue.SimpleQueue[Recording] = queue.SimpleQueue()
        self._waiting = 0
        """Tokens of the recordings in the queue."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._handing = threading.Event()
        """Set when a part is complete, and at the end."""
        self._threads = [
            threading.Thread(target=self._spool_all, name="request-log", daemon=True),
            threading.Thread(target=self._hand_on_all, name="request-log-store", daemon=True),
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float) -> None:
        """Writes what waits, for so long; the rest stays in the spool, for the next process. Blocking."""
        ends = time.monotonic() + seconds
        self._closing.set()
        self._handing.set()
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0.0))

    def take(self, recording: Recording) -> None:
        """Takes a request that has ended."""
        with self._lock:
            full = self._waiting >= _WAITING_TOKENS
            self._waiting += 0 if full else recording.tokens
        if full:
            self._dropped("queue", 1)
        else:
            self._queue.put(recording)

    # The first thread.

    def _spool_all(self) -> None:
        pause = _GATHER_SECONDS
        while not self._closing.wait(pause):
            pause = _GATHER_SECONDS if self._spool_some() < _AT_ONCE else _PAUSE_SECONDS
        while self._spool_some():
            pass
        self._spool.complete()
        self._handing.set()

    def _spool_some(self) -> int:
        """Appends what waits, but not much at once; returns how much it was."""
        found: list[Recording] = []
        with suppress(queue.Empty):
            while len(found) < _AT_ONCE:
                found.append(self._queue.get_nowait())
        try:
            self._spool_these(found)
        except Exception:  # no handle or memory left, say: the thread must not end for it
            log.exception("requests could not be logged")
            self._dropped("error", len(found))
        return len(found)

    def _spool_these(self, found: Sequence[Recording]) -> None:
        if found:
            with self._lock:
                self._waiting -= sum(one.tokens for one in found)
            if (part := self._append(found)) is not None:
                # Said while the part is being written: whoever is killed here has it in its spool.
                with suppress(Unavailable):  # it is said again before it is handed on
                    self._index.waits(part, time.time())
        if self._spool.complete(older_than=self._part_seconds):
            self._handing.set()

    def _append(self, recordings: Sequence[Recording]) -> str | None:
        """The part that these recordings begin, if they do."""
        if not self._spool.has_room():
            self._dropped("spool", len(recordings))
            return None
        entries = []
        for recording in recordings:
            try:
                entries.append(self._line(recording))
            except Exception:  # one request that cannot be told must not end the log
                log.exception("a request could not be logged", completion_id=recording.id)
                self._dropped("error", 1)
        try:
            part = self._spool.append(entries) if entries else None
        except OSError as error:
            log.warning("the spool of the request log cannot be written", reason=str(error))
            self._dropped("disk", len(entries))
            return None
        self._written(len(entries))
        return part

    def _line(self, recording: Recording) -> tuple[Entry, bytes]:
        record = recording.record()
        self._redaction.apply(record)
        line = to_json(LOGGED_REQUEST.stamped(record))
        entry = Entry(record["id"], record["at"], record["owner"], record["user"], record["session"], record["also"])
        return entry, line

    # The second thread.

    def _hand_on_all(self) -> None:
        away, swept = False, 0.0
        while True:
            last = self._closing.is_set() and not self._threads[0].is_alive()
            try:
                if time.monotonic() - swept > _SWEEP_SECONDS or not swept:
                    self._parts.sweep(time.time() - self._keep_seconds)
                    swept = time.monotonic()
                while self._hand_on():
                    pass
                away = False
            except Exception as error:  # a store that is away, no handle or memory left: it is handed on later
                if not away:
                    bug = not isinstance(error, TemperError)
                    log.warning("the request log waits in its spool", reason=str(error), exc_info=bug)
                away = True
                if self._closing.is_set():
                    return
                with suppress(Unavailable):
                    self._index.wait_still(self._spool.parts(), time.time())
            if last:
                return
            self._handing.wait(timeout=1.0)
            self._handing.clear()
            if away:
                self._closing.wait(_RETRY_SECONDS)

    def _hand_on(self) -> bool:
        """Writes one part; False: there is none. Raises Unavailable; then it stays in the spool."""
        with self._spool.next() as found:
            if found is None:
                return False
            self._index.waits(found.part, time.time())
            if found.requests:
                self._write(found)
            self._index.waits_no_longer(found.part)
        return True

    def _write(self, found: SpooledPart) -> None:
        lines: list[tuple[Entry, Line]] = []
        offset = 0
        for entry, line in found.requests:
            lines.append((entry, Line(found.part, offset, len(line))))
            offset += len(line) + 1
        if not self._index.is_whole():
            count = RequestLog(self._parts, self._index).reindex(time.time())
            log.info("the index of logged requests was made again from its parts", requests=count)
        self._parts.write(found.part, b"".join(line + b"\n" for _, line in found.requests))
        now = time.time()
        self._index.add(found.part, lines, now)
        # Who erases leaves a mark and looks into the index then; here it is the other way round.
        marks = self._index.erased()
        gone = [(entry, line) for entry, line in lines if entry.erased_by(marks)] if marks else []
        if gone:
            self._parts.take_out([line for _, line in gone])
            self._index.remove([entry for entry, _ in gone])
