"""Download from a source into a directory: several files at a time, resumed where they stopped, checked against the
source."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import structlog
import tenacity

from services.model_source.errors import SourceAway, SourceBroken, SourceRejected, one_line
from services.model_source.files import RemoteFile, Source, matches, notes

log = structlog.get_logger(__name__)

_PROGRESS_SECONDS = 10.0
_TOLD_SECONDS = 0.2
_GIB = 2**30
T = TypeVar("T")


class Downloader:
    """Fetches files of one source into one directory, which nobody else writes.

    What is half there is in ``NAME.part``; beside it and beside each finished file lies ``NAME.version``, so that a
    later attempt knows whether it is still what the source has.

    Args:
        attempts: in a row without a new byte.
        told: called with the bytes that are there and those of all files, some times a second.
    """

    def __init__(
        self,
        source: Source,
        directory: Path,
        *,
        connections: int,
        attempts: int,
        told: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._source, self._directory = source, directory
        self._connections, self._attempts = connections, attempts
        self._told = told

    def list_files(self) -> list[RemoteFile]:
        """What the source has.

        Raises:
            SourceAway: after all attempts.
            SourceRejected: it has none of it.
        """
        return self._patiently(self._source.files, lambda: 0)

    def missing_bytes(self, files: Sequence[RemoteFile]) -> int:
        """How many are still to be fetched."""
        return sum(0 if self._is_there(file) else file.size - self._have(file) for file in files)

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Fetches what is not there yet.

        Raises:
            SourceAway: the source went away.
            SourceRejected: it gives other bytes than it says.
            OSError: they cannot be written.
        """
        missing = [file for file in files if not self._is_there(file)]
        there = sum(file.size for file in files if file not in missing)
        progress = _Progress(sum(file.size for file in files), there, self._told)
        pool = ThreadPoolExecutor(self._connections, thread_name_prefix="fetch")
        try:
            tasks = [pool.submit(self._fetch, file, progress) for file in missing]
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            progress.stop()
            pool.shutdown(cancel_futures=True)

    def _fetch(self, file: RemoteFile, progress: _Progress) -> None:
        partial = self._partial(file)
        for last in (False, True):
            if self._have(file) == 0:
                partial.unlink(missing_ok=True)
                self._note(file)
            progress.add(self._have(file))
            self._patiently(lambda: self._append(file, partial, progress), lambda: self._have(file))
            if matches(file, partial):
                break
            partial.unlink()
            if last:
                raise SourceRejected(
                    "TEMPER_MODEL_SOURCE",
                    f"{self._source} gives other bytes of {file.name} than it says: {file.checksum}",
                )
            progress.add(-file.size)
        partial.replace(self._directory / file.name)

    def _append(self, file: RemoteFile, partial: Path, progress: _Progress) -> None:
        have = partial.stat().st_size if partial.exists() else 0
        if have == file.size:
            partial.touch()
            return
        with self._source.open(file, have) as (begin, blocks), partial.open("ab") as handle:
            if begin != have:
                progress.add(begin - have)
                handle.truncate(begin)
            for block in blocks:
                progress.check()
                handle.write(block)
                progress.add(len(block))
        size = partial.stat().st_size
        if size < file.size:
            raise SourceBroken(f"{file.name} ended after {size:,} of {file.size:,} bytes")
        if size > file.size:
            partial.unlink()
            progress.add(-size)
            raise SourceBroken(f"{file.name} has more than the {file.size:,} bytes that the source says")

    def _is_there(self, file: RemoteFile) -> bool:
        path = self._directory / file.name
        return path.is_file() and path.stat().st_size == file.size and self._noted(file)

    def _have(self, file: RemoteFile) -> int:
        """Bytes of an unfinished file that are still worth something."""
        partial = self._partial(file)
        if not partial.is_file() or not self._noted(file):
            return 0
        size = partial.stat().st_size
        return size if size <= file.size else 0

    def _note(self, file: RemoteFile) -> None:
        self._version_of(file).write_text(json.dumps([str(self._source), file.version, file.size]))

    def _noted(self, file: RemoteFile) -> bool:
        try:
            return bool(json.loads(self._version_of(file).read_text())[1:] == [file.version, file.size])
        except (OSError, ValueError, TypeError, IndexError):
            return False

    def _version_of(self, file: RemoteFile) -> Path:
        return self._directory / notes(file.name)[1]

    def _partial(self, file: RemoteFile) -> Path:
        return self._directory / notes(file.name)[0]

    def _patiently(self, call: Callable[[], T], have: Callable[[], int]) -> T:
        """Calls again what broke, ever more slowly, as long as some attempt in a row brings a new byte."""
        best, failures = have(), 0

        def exhausted(_: tenacity.RetryCallState) -> bool:
            nonlocal best, failures
            now = have()
            failures = 1 if now > best else failures + 1
            best = max(best, now)
            return failures >= self._attempts

        def say(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            log.warning("model_source_retry", attempt=failures, reason=one_line([error]))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(SourceBroken),
            stop=exhausted,
            wait=lambda _: min(0.2 * 2**failures, 10.0),
            before_sleep=say,
            reraise=True,
        )
        try:
            return retrying(call)
        except SourceBroken as error:
            raise SourceAway(
                "TEMPER_MODEL_SOURCE", f"gave up after {self._attempts} attempts without a new byte: {error}"
            ) from error


class _Progress:
    """Counts bytes of all files together and logs now and then. Thread-safe."""

    def __init__(self, total: int, there: int, told: Callable[[int, int], None]) -> None:
        self._total, self._done, self._begun_at = total, there, there
        self._began = self._said = self._told_at = time.monotonic()
        self._told = told
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._told_at > _TOLD_SECONDS or self._done == self._total:
                self._told_at = now
                self._told(self._done, self._total)
            if now - self._said < _PROGRESS_SECONDS:
                return
            self._said = now
            seconds = now - self._began
            log.info(
                "model_source_progress",
                gib_done=round(self._done / _GIB, 2),
                gib_total=round(self._total / _GIB, 2),
                percent=round(100 * self._done / max(self._total, 1), 1),
                mb_per_second=round((self._done - self._begun_at) / 1e6 / seconds, 1),
            )

    def stop(self) -> None:
        """Makes the other threads end at their next block: one of them has failed, or all are done."""
        self._stopped.set()

    def check(self) -> None:
        """Raises SourceRejected after stop()."""
        if self._stopped.is_set():
            raise SourceRejected("TEMPER_MODEL_SOURCE", "stopped, because another file failed")
