"""Directories that exist as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import InvalidRequest
from services.common.storage.durable import sync_directory

MARGIN_BYTES = 64 * 2**20
"""Left free on a disk that is written to."""


def bytes_below(directory: Path) -> int:
    """Bytes of the files below a directory, which need not be there."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def refuse_filled(target: Path) -> None:
    """Raises InvalidRequest if something else than an empty directory is there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidRequest(f"{target} is there already: name another directory, or remove it first", param="out")


@contextlib.contextmanager
def whole_directory(target: Path, need: int) -> Iterator[Path]:
    """A scratch directory beside ``target`` that becomes it when the block ends well, and vanishes otherwise.

    Args:
        need: bytes that will be written.

    Raises:
        InvalidRequest: the target is there already, or the disk cannot hold it, or is not writable.
    """
    target = target.absolute()
    refuse_filled(target)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if need + MARGIN_BYTES > free:
            raise InvalidRequest(
                f"{target} needs {_mib(need)} and {_mib(MARGIN_BYTES)} to spare, and the disk has {_mib(free)} free: "
                "make room, or write to another disk",
                param="out",
            )
        scratch.mkdir()
    except OSError as error:
        raise InvalidRequest(f"cannot write to {target}: {error.strerror}", param="out") from error
    try:
        yield scratch
        _flush(scratch)
        if target.is_dir():
            target.rmdir()
        scratch.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise InvalidRequest(f"writing {target} failed: {error.strerror or error}", param="out") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _flush(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
