"""Private versions: policies of training jobs in adapter slots, without a version in the store.

A rollout job samples from the adapter that it trains, many times before it publishes a version. Its weights go into a
slot like those of a version, but under a handle of their own. A client cannot name the handle, no list has it, and its
digest is new, so no cache entry of an earlier round matches it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.common.adapters.composition import Published
from services.common.errors import Overloaded
from services.engine.requests.adapter import PrivateVersion

if TYPE_CHECKING:
    from services.engine.adapters.loader import AdapterLoader
    from services.engine.adapters.slot_table import SlotTable

_PAUSE_SECONDS = 0.05
"""Time between two looks for a free slot, seconds."""


class PrivateVersions:
    """Loads policies into slots of the adapter manager and removes them again. Thread-safe.

    Args:
        changed: guards ``table``.
        keep: returns versions that stay although no request is pinned to them; called with the lock held.
        freed: called, with the lock held, when a slot may have become free.
        wait_seconds: longest wait of a policy for a slot.
    """

    def __init__(
        self,
        changed: threading.Condition,
        table: SlotTable,
        loader: AdapterLoader,
        *,
        keep: Callable[[], Collection[Published]],
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
        """Context manager with a policy in a slot. However the block ends, the policy cannot be requested afterwards.
        Requests that are pinned to it still end with it; the slot is free once the last one has.

        Args:
            files: the same files as of a published version.
            interrupt: called while waiting for a slot; may raise.

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
