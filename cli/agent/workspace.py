"""The directory that an agent works in: files are reached beneath it and nowhere else, whatever links say and however
they change meanwhile."""

from __future__ import annotations

import ctypes
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cli.settings import contexts_file

_OPENAT2 = 437
"""The same number on all architectures."""
_NO_MAGIC_LINKS, _BENEATH = 0x02, 0x08
_MOST_READ = 1 << 20
_MOST_LISTED = 1000
_DATA_DIRECTORIES = (".temper", ".")
"""Where `temper up` may keep its keys."""


class OutsideWorkspace(Exception):
    """A path is not in the workspace, or not what a tool can use."""


class _How(ctypes.Structure):
    """struct open_how."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@dataclass(frozen=True, slots=True)
class Workspace:
    """A directory by its real path. Raises ValueError: it is none, or has the keys of a Temper."""

    root: Path

    def __post_init__(self) -> None:
        if str(self.root) != os.path.realpath(self.root) or not self.root.is_dir():
            raise ValueError(f"{self.root} is not a directory")
        if Path.home().resolve().is_relative_to(self.root):
            raise ValueError(f"{self.root} has your home with all that is in it: choose a project's directory")
        if contexts_file().is_file() and contexts_file().resolve().is_relative_to(self.root):
            raise ValueError(f"{self.root} has the keys of `temper context`: choose a project's directory")
        for name in _DATA_DIRECTORIES:
            if (self.root / name / "secrets.json").exists():
                raise ValueError(
                    f"{self.root / name} has the keys of a `temper up`, which tools must not see: choose another "
                    "directory for the agent, or for `temper up --data-dir`"
                )

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> str:
        """Lines of a text file.

        Args:
            offset: lines to leave out.
            limit: lines to return; None: all.

        Raises:
            OutsideWorkspace: there is no such file in the workspace.
        """
        descriptor = self._open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OutsideWorkspace(f"{path} is not a file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(_MOST_READ + 1)
        finally:
            os.close(descriptor)
        text = data[:_MOST_READ].decode(errors="replace")
        if len(data) > _MOST_READ:
            text += f"\n[the rest of the file, beyond {_MOST_READ} bytes, is not shown]"
        lines = text.splitlines(keepends=True)
        return "".join(lines[offset : None if limit is None else offset + limit])

    def write(self, path: str, content: str) -> None:
        """Replaces a file as a whole; directories above it are made.

        Raises:
            OutsideWorkspace: it cannot be in the workspace.
        """
        parts = self._relative(path).parts
        if not parts or parts[-1] == "..":
            raise OutsideWorkspace(f"{path!r} names no file")
        parent = self._directory(parts[:-1])
        scratch = f".temper-{secrets.token_hex(8)}"
        try:
            mode = 0o644
            try:
                found = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    raise OutsideWorkspace(f"{path} is a directory")
                if stat.S_ISREG(found.st_mode):
                    mode = stat.S_IMODE(found.st_mode) & 0o777
            except FileNotFoundError:
                pass
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content.encode())
                os.rename(scratch, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                os.unlink(scratch, dir_fd=parent)
                raise
        except OSError as error:
            raise OutsideWorkspace(f"{path}: {error.strerror}") from error
        finally:
            os.close(parent)

    def list(self, path: str = ".") -> list[str]:
        """Names in a directory, sorted, directories with a slash.

        Raises:
            OutsideWorkspace: there is no such directory in the workspace.
        """
        descriptor = self._open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(descriptor) as entries:
                names = sorted(
                    f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in entries
                )
        finally:
            os.close(descriptor)
        more = len(names) - _MOST_LISTED
        return names if more <= 0 else [*names[:_MOST_LISTED], f"[{more} more names are not shown]"]

    def _directory(self, parts: tuple[str, ...]) -> int:
        """A descriptor of a directory that is made where it is missing."""
        here = self._open(".", os.O_RDONLY | os.O_DIRECTORY)
        for place, name in enumerate(parts):
            try:
                if name != "..":
                    os.mkdir(name, dir_fd=here)
            except FileExistsError:
                pass
            except OSError as error:
                raise OutsideWorkspace(f"{'/'.join(parts)}: {error.strerror}") from error
            finally:
                os.close(here)
            here = self._open("/".join(parts[: place + 1]), os.O_RDONLY | os.O_DIRECTORY)
        return here

    def _relative(self, path: str) -> PurePosixPath:
        found = PurePosixPath(path)
        if "\0" in path or not path.strip():
            raise OutsideWorkspace("a path is missing, or has a zero byte")
        if found.is_absolute():
            if not found.is_relative_to(self.root):
                raise OutsideWorkspace(f"{path} is outside of the workspace {self.root}: use paths relative to it")
            found = found.relative_to(self.root)
        return found

    def _open(self, path: str, flags: int) -> int:
        """A descriptor of what is beneath the root: the kernel follows no link that leads out."""
        relative = str(self._relative(path))
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            how = _How(flags | os.O_CLOEXEC, 0, _BENEATH | _NO_MAGIC_LINKS)
            libc = ctypes.CDLL(None, use_errno=True)
            found = int(libc.syscall(_OPENAT2, root, os.fsencode(relative), ctypes.byref(how), ctypes.sizeof(how)))
        finally:
            os.close(root)
        if found < 0:
            number = ctypes.get_errno()
            reason = "is outside of the workspace" if os.strerror(number).startswith("Invalid cross") else None
            raise OutsideWorkspace(f"{path}: {reason or os.strerror(number)}")
        return found
