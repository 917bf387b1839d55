"""Lists of runs in the object store, newest first, of which a page is read without the others.

Keys of a store are listed in ascending order, and ids of runs grow with time: a list has their mirror images. All runs
are in one list, and those of each API key in one of its own, so that no page is spent on what its reader may not see.
"""

from __future__ import annotations

import string

from services.common.storage.ids import key_of
from services.common.storage.object_store import ObjectStore

_ALL = "all"
_CHARACTERS = "-" + string.digits + string.ascii_uppercase + string.ascii_lowercase
_MIRROR = str.maketrans(_CHARACTERS, _CHARACTERS[::-1])
PAGE = 100


class RunList:
    """Runs under one prefix. Thread-safe and blocking; Unavailable when the object store is away.

    Args:
        prefix: of its keys; ends in "/".
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def add(self, run: str, key_id: str) -> None:
        """Adds a run. May be repeated.

        Args:
            key_id: of the API key whose run it is; empty: there were no keys.
        """
        for name in (_ALL, key_of(key_id)):
            self._store.put(f"{self._prefix}{name}/{_mirrored(run)}", b"")

    def remove(self, run: str, key_id: str) -> None:
        """Removes a run; none there is fine."""
        for name in (_ALL, key_of(key_id)):
            self._store.delete(f"{self._prefix}{name}/{_mirrored(run)}")

    def newest(self, key_id: str | None = None, after: str | None = None, limit: int = PAGE) -> list[str]:
        """Ids of at most ``limit`` runs, newest first.

        Args:
            key_id: of one API key only; None: everybody's.
            after: continue behind this id, whether it is there or not.
        """
        prefix = f"{self._prefix}{_ALL if key_id is None else key_of(key_id)}/"
        keys = self._store.list_page(prefix, "" if after is None else _mirrored(after), limit)
        return [_mirrored(key.removeprefix(prefix)) for key in keys]


def _mirrored(run: str) -> str:
    """A text that sorts the other way round; of that one again, it is the first."""
    return run.translate(_MIRROR)
