"""Policies that only one training job knows: weights in an adapter slot that no version in the store stands for.

A rollout job samples from the adapter that it trains, many times before it publishes one. Its weights go into a slot as
those of a version do, but under a handle of their own: nothing that a client can send makes one, it is in no list, and
its digest was never used before, so that no cache entry of an earlier round is found under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.common.adapters.names import AdapterVersion
from services.common.errors import Overloaded
from services.engine.requests.adapter import PrivateVersion

if TYPE_CHECKING:
    from services.engine.adapters.loader import AdapterLoader
    from services.engine.adapters.slot_table import SlotTable

_PAUSE_SECONDS = 0.05
"""Between two looks for a free slot."""


class PrivateVersions:
    """Puts policies into slots of the adapter manager and takes them out again. Thread-safe.

    Args:
        changed: guards ``table``.
        keep: versions that stay although no request is pinned to them; called with the lock held.
        freed: told, with the lock held, when a slot may have become free.
        wait_seconds: how long a policy waits for a slot.
    """

    def __init__(
        self,
        changed: threading.Condition,
        table: SlotTable,
        loader: AdapterLoader,
        *,
        keep: Callable[[], Collection[AdapterVersion]],
        freed: Callable[[], None],
        wait_seconds: float,
    ) -> None:
        self._changed = changed
        self._table = table
        self._loader = loader
        self._keep = keep
        self._freed = freed
        self._wait_seconds = wait_seconds

    @contextmanager
    def loaded(self, files: Mapping[str, bytes], interrupt: Callable[[], None]) -> Iterator[PrivateVersion]:
        """The policy is in a slot while the block runs, and is unfindable afterwards, however the block ends. Requests
        that are still pinned to it then end with it; their slot is free once the last one has.

        Args:
            files: as of a published version.
            interrupt: called while a slot is waited for; may raise.

        Raises:
            Overloaded: no slot became free in time.
            AdapterRejected: the files do not bind.
        """
        version = PrivateVersion.fresh()
        slot = self._take(version, interrupt)
        try:
            self._loader.load_files(files, slot)
        except BaseException:
            with self._changed:
                self._table.give_back(slot)
                self._freed()
            raise
        with self._changed:
            self._table.put(version, version.digest, slot)
        try:
            yield version
        finally:
            with self._changed:
                self._table.forget(version)
                self._freed()

    def _take(self, version: PrivateVersion, interrupt: Callable[[], None]) -> int:
        until = time.monotonic() + self._wait_seconds
        try:
            while True:
                with self._changed:
                    slot = self._table.take(version, version, self._keep())
                if slot is not None:
                    return slot
                if time.monotonic() >= until:
                    raise Overloaded(
                        f"the job found no adapter slot for its policy in {self._wait_seconds:g} s: all of them are in "
                        "use by running requests; submit it again when there is less traffic on adapters, or raise "
                        "TEMPER_ADAPTER_SLOTS"
                    )
                interrupt()
                time.sleep(_PAUSE_SECONDS)
        finally:
            with self._changed:
                self._table.leave(version)
                self._freed()
