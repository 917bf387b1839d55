"""Work directory of a pipeline: each stage's result is there whole or not at all, under a name that its inputs decide.

A stage whose inputs are those of an earlier run is not done again; one with other inputs gets another name, and nothing
is overwritten. Without torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import Conflict, InvalidRequest
from services.common.security.sources import sources_digest
from services.common.storage.durable import sync_directory
from services.forge.record import FORGE_SOURCES

_LOCK = ".lock"
_KEY_DIGITS = 16
_STATE, _PARTIAL = ".state", ".partial"
_NAME = rf".+-[0-9a-f]{{{_KEY_DIGITS}}}"
_MADE = re.compile(rf"{_NAME}(\{_STATE})?|\.{_NAME}\..+\{_PARTIAL}")
"""Names of results and states, and of writes that were broken off."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a stage's result."""

    name: str
    key: str
    """Digest of the stage's inputs; what comes of it is an input of later stages by this."""
    path: Path
    """File or directory; it is there once the stage is done."""
    state: Path
    """Directory of what the stage continues from after a break."""

    @property
    def done(self) -> bool:
        return self.path.exists()

    def finish(self) -> None:
        """Gives the state, which is complete, the result's name.

        Raises:
            InvalidRequest: the disk does not let it.
        """
        try:
            self.state.rename(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise InvalidRequest(f"cannot write {self.path}: {error.strerror}", param="work") from error


class Work:
    """Work directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._code = sources_digest(FORGE_SOURCES)
        self._used: list[Place] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else works in the directory meanwhile.

        Raises:
            Conflict: somebody does.
            InvalidRequest: it cannot be written.
        """
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)  # users' examples are in it
            lock = (self.directory / _LOCK).open("a")
        except OSError as error:
            raise InvalidRequest(
                f"the work directory {self.directory} cannot be written: {error.strerror}", param="work"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Conflict(
                    f"another run works in {self.directory}: wait for it, or name another directory with --work",
                    param="work",
                ) from error
            yield

    def place(self, name: str, inputs: Mapping[str, Any]) -> Place:
        """Place of a stage's result.

        Args:
            name: of the stage, with its cycle.
            inputs: all that the result depends on, as JSON; files by digest. The code is added.
        """
        text = json.dumps({"stage": name, "code": self._code, "inputs": inputs}, sort_keys=True, allow_nan=False)
        key = hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]
        path = self.directory / f"{name}-{key}"
        place = Place(name, key, path, path.with_name(f"{path.name}{_STATE}"))
        self._used.append(place)
        for there in (place.path, place.state):
            if there.exists():
                os.utime(there)  # it is not old
        return place

    def forget(self) -> None:
        """Removes every result that was asked for."""
        for place in self._used:
            for path in (place.path, place.state):
                _remove(path)

    def forget_old(self, seconds: float) -> None:
        """Removes results that nobody has asked for in so many seconds. Call it with the lock held."""
        for path in self._made():
            if time.time() - path.stat().st_mtime > seconds:
                _remove(path)

    def remove(self) -> None:
        """Removes all results, and the directory unless something else is in it. Call it with the lock held."""
        for path in self._made():
            _remove(path)
        (self.directory / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            self.directory.rmdir()

    def clean(self) -> None:
        """Removes what earlier processes left that were killed: broken-off writes, and states of what is done. Call it
        with the lock held."""
        for path in self._made():
            whole = path.with_name(path.name.removesuffix(_STATE))
            if path.name.endswith(_PARTIAL) or (whole != path and whole.exists()):
                _remove(path)

    def _made(self) -> list[Path]:
        """What stages have made here, and nothing of somebody else."""
        return [path for path in self.directory.iterdir() if _MADE.fullmatch(path.name)]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
