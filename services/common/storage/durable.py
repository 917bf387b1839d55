"""Writes that survive a power failure: the names in a directory, too."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Returns once the names in a directory, as they are now, are on the disk: a file that was synchronized and renamed
    could otherwise be there under its old name, or none.

    Raises:
        OSError
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
