"""Engines and clients that the tests of manager share."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from services.engine.kv_offload.entry_format import Header
from services.engine.kv_offload.messages import (
    Bytes,
    Entry,
)
from tests.unit.engine.kv_offload.toy_device import Bench


class Stuck:
    """Reads of files that go on only when they may."""

    def __init__(self, bench: Bench) -> None:
        assert bench.manager._files is not None
        self._read = bench.manager._files.read
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        bench.manager._files.read = self  # type: ignore[method-assign]

    def __call__(self, entry: Entry, target: Sequence[Bytes]) -> Header:
        self.begun.set()
        assert self.may_go_on.wait(20)
        return self._read(entry, target)
