"""Records of Tinker's sessions, runs and checkpoints in the object store; what they are about lies elsewhere.

Objects:
    tinker/sessions/{session}.json               a session
    tinker/owners/{owner}/{session}              empty: whose it is
    tinker/runs/{session}/{number:04d}.json      a run, and the training session that computes it
    tinker/checkpoints/{session}/{number:04d}/{kind}/{name}.json
    tinker/expiry/{unix:012d}/{session}/{number}/{kind}/{name}   empty: a checkpoint to look at then

The weights are ordinary: checkpoints of training sessions, and versions of adapters.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from typing import Any, TypeVar

from services.common.errors import NotFound
from services.common.jobs.training_sessions.names import checkpoint_key
from services.common.storage.ids import key_of
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from services.common.storage.record_versions import TINKER
from services.common.validation.strict_models import StrictModel
from services.gateway.api.training.tinker.names import CheckpointKind, RunId, check_session, path_of
from services.gateway.auth.caller import owner, sees
from services.gateway.core.file_store import StoreThreads

_ROOT = "tinker/"
_KEPT = 4096
"""Sessions and runs that a gateway remembers."""
_TIDIED = 256
"""Checkpoints that one look removes."""


class SessionRecord(StrictModel):
    """A session."""

    id: str
    owner: str
    created_at: float
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] | None = None
    project_id: str | None = None
    display_name: str | None = None
    finished: str | None = None
    """Reason that its client gave; None: it goes on."""


class RunRecord(StrictModel):
    """A training run."""

    id: str
    owner: str
    created_at: float
    training_session: str
    base_model: str
    rank: int
    adapter: str
    """Name whose versions its samplers are."""
    train_mlp: bool | None = None
    """None: as in what it was loaded from."""
    train_attn: bool | None = None
    user_metadata: dict[str, Any] | None = None


class CheckpointRecord(StrictModel):
    """A checkpoint of a run."""

    run: str
    owner: str
    kind: CheckpointKind
    name: str
    target: str
    """Checkpoint of a training session, or "adapter@n"."""
    created_at: float
    size_bytes: int | None = None
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        return path_of(RunId.parse(self.run), self.kind, self.name)


Record = TypeVar("Record", SessionRecord, RunRecord, CheckpointRecord)


class TinkerRecords:
    """Records of all gateways. Used from the event loop.

    Every method may raise Unavailable: the object store is away.
    """

    def __init__(self, store: ObjectStore, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads
        self._known: OrderedDict[str, SessionRecord | RunRecord] = OrderedDict()

    # -- sessions

    async def add_session(self, record: SessionRecord) -> None:
        """Keeps a new session, or another state of it."""
        await self._threads.run(self._put, _session_key(record.id), record)
        await self._threads.run(self._store.put, f"{_ROOT}owners/{key_of(record.owner)}/{record.id}", b"")
        self._remember(_session_key(record.id), record)

    async def session(self, session: str) -> SessionRecord:
        """Raises NotFound: there is none, or it is another API key's."""
        key = _session_key(check_session(session))
        record = self._known.get(key)
        if not isinstance(record, SessionRecord):
            record = await self._read(key, SessionRecord, f"no such session: {session!r}", "session_id")
            self._remember(key, record)
        if not sees(record.owner):
            raise NotFound(f"no such session: {session[:80]!r}", param="session_id")
        return record

    async def sessions(self) -> list[str]:
        """Ids of the caller's sessions, newest first."""
        prefix = f"{_ROOT}owners/{key_of(owner())}/"
        keys = await self._threads.run(lambda: list(self._store.list(prefix)))
        return sorted((key.removeprefix(prefix) for key in keys), reverse=True)

    # -- runs

    async def add_run(self, record: RunRecord) -> None:
        """Keeps a new run."""
        key = _run_key(RunId.parse(record.id))
        await self._threads.run(self._put, key, record)
        self._remember(key, record)

    async def run(self, run: RunId) -> RunRecord:
        """Raises NotFound: there is none, or it is another API key's."""
        key = _run_key(run)
        record = self._known.get(key)
        if not isinstance(record, RunRecord):
            record = await self._read(key, RunRecord, f"no such model: {str(run)!r}", "model_id")
            self._remember(key, record)
        if not sees(record.owner):
            raise NotFound(f"no such model: {str(run)!r}", param="model_id")
        return record

    async def runs(self, session: str) -> list[RunRecord]:
        """Runs of a session, oldest first."""
        keys = await self._threads.run(lambda: sorted(self._store.list(f"{_ROOT}runs/{session}/")))
        numbers = [int(key.rpartition("/")[2].removesuffix(".json")) for key in keys]
        return [await self.run(RunId(session, number)) for number in numbers]

    # -- checkpoints

    async def add_checkpoint(self, record: CheckpointRecord) -> None:
        """Keeps a checkpoint, in place of one of the same name."""
        run = RunId.parse(record.run)
        await self._threads.run(self._put, _checkpoint_key(run, record.kind, record.name), record)
        if record.expires_at is not None:
            about = f"{run.session}/{run.number}/{record.kind}/{record.name}"
            await self._threads.run(self._store.put, f"{_ROOT}expiry/{int(record.expires_at):012d}/{about}", b"")

    async def checkpoint(self, run: RunId, kind: CheckpointKind, name: str) -> CheckpointRecord:
        """Raises NotFound: there is none, it is another API key's, or its time is over."""
        missing = f"there is no checkpoint {path_of(run, kind, name)}"
        record = await self._read(_checkpoint_key(run, kind, name), CheckpointRecord, missing, "path")
        if not sees(record.owner) or (record.expires_at is not None and record.expires_at <= time.time()):
            raise NotFound(missing, param="path")
        return record

    async def checkpoints(self, run: RunId) -> list[CheckpointRecord]:
        """Checkpoints of a run, oldest first."""
        prefix = f"{_ROOT}checkpoints/{run.session}/{run.number:04d}/"
        keys = await self._threads.run(lambda: list(self._store.list(prefix)))
        found = []
        for key in keys:
            try:
                found.append(await self._read(key, CheckpointRecord, "removed meanwhile", "path"))
            except NotFound:
                continue
        now = time.time()
        there = [one for one in found if sees(one.owner) and (one.expires_at is None or one.expires_at > now)]
        return sorted(there, key=lambda one: (one.created_at, one.name))

    async def remove_checkpoint(self, record: CheckpointRecord) -> None:
        """Removes a checkpoint. A version of an adapter stays, until the adapter is pruned or deleted."""
        run = RunId.parse(record.run)
        await self._threads.run(self._store.delete, _checkpoint_key(run, record.kind, record.name))
        if record.kind == "weights":
            await self._threads.run(self._store.delete, checkpoint_key(record.target))

    async def tidy(self) -> int:
        """Removes checkpoints whose time is over; returns how many."""
        removed = 0
        keys = await self._threads.run(lambda: sorted(self._store.list(f"{_ROOT}expiry/"))[:_TIDIED])
        for key in keys:
            due, session, number, kind, name = key.removeprefix(f"{_ROOT}expiry/").split("/")
            if int(due) > time.time():
                break
            run = RunId(session, int(number))
            stored: CheckpointKind = "weights" if kind == "weights" else "sampler_weights"
            try:
                record = await self._read(_checkpoint_key(run, stored, name), CheckpointRecord, "removed", "path")
            except NotFound:
                record = None
            if record is not None and record.expires_at is not None and record.expires_at <= time.time():
                await self.remove_checkpoint(record)
                removed += 1
            await self._threads.run(self._store.delete, key)
        return removed

    # -- parts

    def _remember(self, key: str, record: SessionRecord | RunRecord) -> None:
        self._known[key] = record
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def _put(self, key: str, record: StrictModel) -> None:
        self._store.put(key, json.dumps(TINKER.stamped(record.model_dump())).encode())

    async def _read(self, key: str, kind: type[Record], missing: str, param: str) -> Record:
        try:
            stored = await self._threads.run(self._store.get, key)
        except ObjectNotFound as error:
            raise NotFound(missing, param=param) from error
        with TINKER.reading(key):
            return kind.model_validate(TINKER.unstamped(json.loads(stored.data), key))


def _session_key(session: str) -> str:
    return f"{_ROOT}sessions/{session}.json"


def _run_key(run: RunId) -> str:
    return f"{_ROOT}runs/{run.session}/{run.number:04d}.json"


def _checkpoint_key(run: RunId, kind: CheckpointKind, name: str) -> str:
    return f"{_ROOT}checkpoints/{run.session}/{run.number:04d}/{kind}/{name}.json"
