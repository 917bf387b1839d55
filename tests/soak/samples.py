"""Samples of a running Temper: memory, handles and threads of its processes, disk, objects, keys and logs."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import redis

from services.common.storage.object_store import ObjectStore
from tests.soak.flatness import Bound, Point
from tests.stack import Stack

_MIB = 2**20
BOUNDS: Mapping[str, Bound] = {
    "rss": Bound(0.06, 16.0),
    "handles": Bound(0.05, 6.0),
    "threads": Bound(0.05, 4.0),
    "disk": Bound(0.10, 24.0),
    "objects": Bound(0.10, 12.0),
    "keys": Bound(0.10, 12.0),
    "redis": Bound(0.10, 1.0),
}
"""Bound of each kind of series; memory and disk in MiB."""
_FAMILY = re.compile(r"^(temper:[^:]+)(?::.*?)?(:events|:counts|:leases)?$")


class Sampler:
    """Takes samples; each series has a name "kind what"."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._store = ObjectStore(stack.settings)
        self.redis = redis.Redis.from_url(stack.settings.redis_url.get_secret_value(), decode_responses=True)
        self.series: dict[str, list[Point]] = defaultdict(list)
        self.requests: list[Point] = []
        """Requests so far."""
        self._began = time.monotonic()

    def close(self) -> None:
        self.redis.close()

    def take(self, requests: int) -> None:
        """One sample of everything.

        Args:
            requests: that were sent so far.
        """
        now = time.monotonic() - self._began
        self.requests.append((now, float(requests)))
        found: dict[str, float] = {}
        for name, pid in self._stack.state["pids"].items():
            found |= _process(name, psutil.Process(pid))
        if self._stack.process is not None:
            found |= _process("supervisor", psutil.Process(self._stack.process.pid))
        for directory in sorted(self._stack.data_dir.iterdir()):
            if directory.is_dir() and directory.name != "logs":
                found[f"disk {directory.name}"] = _size(directory) / _MIB
        objects = Counter(key.partition("/")[0] for key in self._store.list(""))
        found |= {f"objects {prefix}": float(count) for prefix, count in objects.items()}
        found["objects all"] = float(objects.total())
        keys = Counter(family(key) for key in self.redis.scan_iter(count=1000))
        found |= {f"keys {name}": float(count) for name, count in keys.items()}
        found["keys all"] = float(keys.total())
        memory: Any = self.redis.info("memory")
        found["redis dataset"] = memory["used_memory_dataset"] / _MIB
        for name in {*self.series, *found}:
            if name not in self.series:  # it was not there before
                self.series[name] = [(at, 0.0) for at, _ in next(iter(self.series.values()), [])]
            self.series[name].append((now, found.get(name, 0.0)))

    def log_bytes(self) -> int:
        """Bytes of all logs so far."""
        return _size(self._stack.data_dir / "logs")


def family(key: str) -> str:
    """A key of Redis without what is of one record."""
    found = _FAMILY.match(key)
    return key if found is None else found[1] + (found[2] or "")


def _process(name: str, process: psutil.Process) -> dict[str, float]:
    """With its children, which an engine has for compilers and sandboxes."""
    several = [process, *process.children(recursive=True)] if name != "supervisor" else [process]
    found: Counter[str] = Counter()
    for one in several:
        try:
            with one.oneshot():
                found["rss"] += one.memory_info().rss
                found["handles"] += one.num_fds()
                found["threads"] += one.num_threads()
        except psutil.NoSuchProcess:
            continue
    return {
        f"rss {name}": found["rss"] / _MIB,
        f"handles {name}": float(found["handles"]),
        f"threads {name}": float(found["threads"]),
    }


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
