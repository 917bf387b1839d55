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

from cli.output import CliError

MOST_BYTES = 256 * 2**20
MOST_FILES = 20_000
NOT_COPIED = f"has more than {MOST_BYTES >> 20} MiB or {MOST_FILES:,} files, or some that cannot be read"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of all files, links and directories of a workspace. No command may run while one is taken or restored."""

    workspace: Path
    copy: Path

    @classmethod
    @contextmanager
    def taken(cls, workspace: Path) -> Iterator[Snapshot | None]:
        """One that goes at the end; None: the workspace is too large, or has what cannot be read."""
        with tempfile.TemporaryDirectory(prefix="temper-agent-") as directory:
            snapshot = cls(workspace, Path(directory) / "copy")
            snapshot.copy.mkdir()
            try:
                taken = not _too_large(workspace)
                if taken:
                    _make_equal(workspace, snapshot.copy)
            except OSError:
                taken = False
            yield snapshot if taken else None

    def restore(self) -> None:
        """Makes the workspace what it was; sockets and pipes in it stay.

        Raises:
            CliError: not all of it could be put back.
        """
        try:
            _make_equal(self.copy, self.workspace)
        except OSError as error:
            raise CliError(f"the workspace is put back in part: {error}") from error


def _too_large(workspace: Path) -> bool:
    """Raises OSError: it cannot be read."""
    size = files = 0
    for directory, folders, names in os.walk(workspace, onerror=_raise):
        files += len(names) + len(folders)
        size += sum(os.lstat(os.path.join(directory, name)).st_size for name in names)
        if size > MOST_BYTES or files > MOST_FILES:
            return True
    return False


def _raise(error: OSError) -> None:
    raise error


def _make_equal(source: Path, target: Path) -> None:
    """Makes a directory equal to another one, whose rights it gets in the end; a link is never followed."""
    target.chmod(0o700)
    wanted = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(source)}
    for entry in list(os.scandir(target)):
        mode, there_before = entry.stat(follow_symlinks=False).st_mode, wanted.get(entry.name)
        if _is_copied(mode) if there_before is None else stat.S_IFMT(mode) != stat.S_IFMT(there_before.st_mode):
            _remove(Path(entry.path))
    for name, status in wanted.items():
        here, there = source / name, target / name
        if stat.S_ISDIR(status.st_mode):
            there.mkdir(exist_ok=True)
            _make_equal(here, there)
        elif stat.S_ISLNK(status.st_mode):
            if not there.is_symlink() or os.readlink(there) != os.readlink(here):
                there.unlink(missing_ok=True)
                there.symlink_to(os.readlink(here))
        elif stat.S_ISREG(status.st_mode) and not _same(status, there):
            there.unlink(missing_ok=True)
            shutil.copy2(here, there, follow_symlinks=False)
    target.chmod(stat.S_IMODE(source.stat().st_mode))


def _remove(path: Path) -> None:
    """Removes a file, or a directory with all in it, whatever its rights say."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
        return
    path.chmod(0o700)
    for entry in list(os.scandir(path)):
        _remove(Path(entry.path))
    path.rmdir()


def _is_copied(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _same(status: os.stat_result, there: Path) -> bool:
    try:
        found = there.lstat()
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns, found.st_mode) == (status.st_size, status.st_mtime_ns, status.st_mode)
