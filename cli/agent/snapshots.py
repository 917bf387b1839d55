"""Copies of a workspace, to go back to."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 256 * 2**20
MOST_FILES = 20_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of all files, links and directories of a workspace. No command may run while one is taken or restored."""

    workspace: Path
    copy: Path

    @classmethod
    @contextmanager
    def taken(cls, workspace: Path) -> Iterator[Snapshot | None]:
        """One that goes at the end; None: the workspace is too large."""
        if _too_large(workspace):
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="temper-agent-") as directory:
            snapshot = cls(workspace, Path(directory))
            _make_equal(workspace, snapshot.copy)
            yield snapshot

    def restore(self) -> None:
        """Makes the workspace what it was; sockets and pipes in it stay."""
        _make_equal(self.copy, self.workspace)


def _too_large(workspace: Path) -> bool:
    size = files = 0
    for directory, folders, names in os.walk(workspace):
        files += len(names) + len(folders)
        size += sum(os.lstat(os.path.join(directory, name)).st_size for name in names)
        if size > MOST_BYTES or files > MOST_FILES:
            return True
    return False


def _make_equal(source: Path, target: Path) -> None:
    """Makes a directory equal to another one; a link is never followed."""
    wanted = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(source)}
    for entry in list(os.scandir(target)):
        mode = entry.stat(follow_symlinks=False).st_mode
        if _is_kept(mode) and stat.S_IFMT(mode) != stat.S_IFMT(
            wanted[entry.name].st_mode if entry.name in wanted else 0
        ):
            if stat.S_ISDIR(mode):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    for name, status in wanted.items():
        here, there = source / name, target / name
        if stat.S_ISDIR(status.st_mode):
            there.mkdir(exist_ok=True)
            _make_equal(here, there)
            there.chmod(stat.S_IMODE(status.st_mode))
        elif stat.S_ISLNK(status.st_mode):
            if not there.is_symlink() or os.readlink(there) != os.readlink(here):
                there.unlink(missing_ok=True)
                there.symlink_to(os.readlink(here))
        elif stat.S_ISREG(status.st_mode) and not _same(status, there):
            there.unlink(missing_ok=True)
            shutil.copy2(here, there, follow_symlinks=False)


def _is_kept(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _same(status: os.stat_result, there: Path) -> bool:
    try:
        found = there.lstat()
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns, found.st_mode) == (status.st_size, status.st_mtime_ns, status.st_mode)
