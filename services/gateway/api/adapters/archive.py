"""A tar.gz of a version's files, made while it is sent."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator, Mapping

_PIECE = 2**20


class _Pipe(io.RawIOBase):
    """A file to write to, whose content is taken away in between."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        part = bytes(memoryview(data))  # type: ignore[arg-type]
        self._parts.append(part)
        return len(part)

    def take(self) -> bytes:
        """What was written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def tar_gz(directory: str, files: Mapping[str, bytes], *, modified: float) -> Iterator[bytes]:
    """Yields the archive in pieces. Equal files give equal bytes.

    Args:
        directory: that the files are in, inside the archive.
        files: content by name.
        modified: Unix seconds, of every file.
    """
    pipe = _Pipe()
    with gzip.GzipFile(fileobj=pipe, mode="wb", compresslevel=1, mtime=0) as packed:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(f"{directory}/{name}")
            info.size, info.mtime, info.mode = len(data), int(modified), 0o644
            packed.write(info.tobuf(tarfile.PAX_FORMAT))
            for start in range(0, len(data), _PIECE):
                packed.write(data[start : start + _PIECE])
                yield pipe.take()
            packed.write(b"\0" * (-len(data) % tarfile.BLOCKSIZE))
        packed.write(b"\0" * (2 * tarfile.BLOCKSIZE))
    yield pipe.take()
