"""Resumable checkpoints: in the object store, on the local disk while that is away.

Layout: `jobs/{job id}/checkpoints/{fence:08d}-{step:08d}/{state.safetensors,state.json,manifest.json}`; the manifest is
written last and holds the digest of the other two, so a torn checkpoint is never loaded. The fence is the claim's that
wrote it: owners never write to the same place, and what a later one wrote counts more than what a former one did, which
may have slept through losing the job. `{step:08d}` alone is of a release without fences, and counts as fence 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import structlog
from safetensors import SafetensorError

from services.common.errors import TemperError, Unavailable
from services.common.storage.durable import sync_directory
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from services.common.storage.record_versions import CHECKPOINT, FIELD
from services.trainer.jobs.base import RunState

TENSORS = "state.safetensors"
DATA = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"(?:(\d+)-)?(\d+)")
_FORGOTTEN_SECONDS = 7 * 86400
"""Age at which local checkpoints of jobs that went elsewhere are removed."""
_RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run's state after ``step`` finished steps."""

    step: int
    state: RunState


class _Place(NamedTuple):
    """Fence and step of a checkpoint, which name its directory. A job goes on from the greatest."""

    fence: int
    step: int

    @classmethod
    def of(cls, name: str) -> _Place | None:
        """None: no checkpoint has this name."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found[1] or 0), int(found[2]))

    def __str__(self) -> str:
        return f"{self.fence:08d}-{self.step:08d}" if self.fence else f"{self.step:08d}"


class CheckpointStore:
    """Reads and writes the checkpoints of jobs. ``directory`` is the local fallback. Thread-safe."""

    def __init__(self, store: ObjectStore, directory: Path, *, keep: int = 2) -> None:
        self._store = store
        self._directory = directory
        self._keep = keep
        self._log = structlog.get_logger("checkpoint")

    def save(self, job_id: str, spec_sha: str, checkpoint: Checkpoint, fence: int = 0) -> None:
        """Uploads, then drops older ones, never any of a later owner.

        Args:
            fence: of the claim; 0: of none.

        Raises:
            Unavailable: the object store is away.
        """
        place = _Place(fence, checkpoint.step)
        for filename, data in _encode(spec_sha, checkpoint).items():
            self._store.put(f"{_prefix(job_id)}{place}/{filename}", data)
        older = sorted((each for each in self._stored(job_id) if each < place), reverse=True)
        for each in older[self._keep - 1 :]:
            self._store.delete_prefix(f"{_prefix(job_id)}{each}/")
        self._drop_local(job_id, place)

    def save_locally(self, job_id: str, spec_sha: str, checkpoint: Checkpoint, fence: int = 0) -> None:
        """Writes to the local disk, atomically and for good, and drops older local ones. ``fence``: see save."""
        place = _Place(fence, checkpoint.step)
        final = self._directory / job_id / str(place)
        partial = final.with_name(f"partial-{uuid.uuid4().hex}")
        partial.mkdir(parents=True)
        for filename, data in _encode(spec_sha, checkpoint).items():
            with (partial / filename).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        sync_directory(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for directory in (final.parent, self._directory):  # the new names in them
            sync_directory(directory)
        self._drop_local(job_id, place, kept=final)

    def _drop_local(self, job_id: str, place: _Place, kept: Path | None = None) -> None:
        """Removes local checkpoints up to a place, and what a process left that died while it wrote."""
        directory = self._directory / job_id
        if not directory.is_dir():
            return
        for path in directory.iterdir():
            other = _Place.of(path.name)
            if path != kept and (other is None or other <= place):
                shutil.rmtree(path, ignore_errors=True)
        if not any(directory.iterdir()):
            directory.rmdir()

    def newest(self, job_id: str, spec_sha: str) -> Checkpoint | None:
        """The newest valid checkpoint of this very spec, wherever it lies.

        Raises:
            Unavailable: the object store is away and the local disk has none.
            NewerSchema: the newest one was written by a later release.
        """
        place, local = self._first_valid(job_id, spec_sha, self._local(job_id), self._read_local)
        try:
            newer = [each for each in self._stored(job_id) if place is None or each > place]
            return self._first_valid(job_id, spec_sha, newer, self._read_stored)[1] or local
        except Unavailable:
            if local is None:
                raise
            return local

    def discard(self, job_id: str) -> None:
        """Removes all checkpoints of a finished job. Raises Unavailable."""
        shutil.rmtree(self._directory / job_id, ignore_errors=True)
        self._store.delete_prefix(_prefix(job_id))

    def forget_old(self) -> None:
        """Removes local checkpoints that nobody came back for."""
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            if path.is_dir() and time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def _local(self, job_id: str) -> set[_Place]:
        directory = self._directory / job_id
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
        return {place for name in names if (place := _Place.of(name)) is not None}

    def _stored(self, job_id: str) -> set[_Place]:
        """Places of the stored checkpoints, from the keys: some servers go on listing emptied directories."""
        names = {key[len(_prefix(job_id)) :].split("/")[0] for key in self._store.list(_prefix(job_id))}
        return {place for name in names if (place := _Place.of(name)) is not None}

    def _first_valid(
        self, job_id: str, spec_sha: str, places: Iterable[_Place], read: Callable[[str, _Place, str], bytes | None]
    ) -> tuple[_Place | None, Checkpoint | None]:
        for place in sorted(places, reverse=True):
            files = {filename: read(job_id, place, filename) for filename in (MANIFEST, TENSORS, DATA)}
            checkpoint = _decode(spec_sha, place.step, files)
            if checkpoint is not None:
                return place, checkpoint
            self._log.warning("checkpoint.invalid", job=job_id, step=place.step, fence=place.fence)
        return None, None

    def _read_local(self, job_id: str, place: _Place, filename: str) -> bytes | None:
        path = self._directory / job_id / str(place) / filename
        return path.read_bytes() if path.is_file() else None

    def _read_stored(self, job_id: str, place: _Place, filename: str) -> bytes | None:
        try:
            return self._store.get(f"{_prefix(job_id)}{place}/{filename}").data
        except ObjectNotFound:
            return None


class CheckpointWriter:
    """Saves the checkpoints of one running job in a thread; the newest one counts, an older one may be passed over.

    While the object store is away the checkpoint lies on the local disk and the upload is tried again and again.

    Args:
        allowed: False once the job is lost: a former owner must not touch its successor's checkpoints.
        saved: called with the step and "s3" or "disk".
        stamp: adds what is not the run's own to the state of each checkpoint.
        fence: of the claim; 0: of none.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        job_id: str,
        spec_sha: str,
        *,
        allowed: Callable[[], bool],
        saved: Callable[[int, str], None],
        stamp: Callable[[RunState], RunState] = lambda state: state,
        fence: int = 0,
    ) -> None:
        self._checkpoints = checkpoints
        self._job_id = job_id
        self._spec_sha = spec_sha
        self._allowed = allowed
        self._saved = saved
        self._stamp = stamp
        self._fence = fence
        self._log = structlog.get_logger("checkpoint").bind(job=job_id)
        self._changed = threading.Condition()
        self._waiting: Checkpoint | None = None
        self._on_disk = -1
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Checkpoint) -> None:
        """Returns at once."""
        checkpoint = Checkpoint(checkpoint.step, self._stamp(checkpoint.state))
        with self._changed:
            self._waiting = checkpoint
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until the newest checkpoint is safe, be it on disk only; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(self._safe, timeout)

    def close(self) -> None:
        """Stops; what was not uploaded yet stays where it is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _safe(self) -> bool:
        return self._waiting is None or self._waiting.step == self._on_disk or self._closed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._closed or not self._allowed():
                    self._closed = True
                    self._changed.notify_all()
                    return
                checkpoint = self._waiting
            if checkpoint is None:
                continue
            try:
                uploaded = self._upload(checkpoint)
            except (TemperError, OSError) as error:  # a full disk, a store that refuses: train on without
                self._log.error("checkpoint.skipped", step=checkpoint.step, error=str(error))
                uploaded = True
            except Exception:  # a bug must not end the thread that every later checkpoint needs
                self._log.exception("checkpoint.skipped", step=checkpoint.step)
                uploaded = True
            with self._changed:
                if uploaded and self._waiting is checkpoint:
                    self._waiting = None
                self._changed.notify_all()
                if not uploaded:
                    self._changed.wait_for(lambda: self._closed, _RETRY_SECONDS)

    def _upload(self, checkpoint: Checkpoint) -> bool:
        try:
            self._checkpoints.save(self._job_id, self._spec_sha, checkpoint, self._fence)
        except Unavailable as error:
            if self._on_disk != checkpoint.step:
                self._log.warning("checkpoint.kept_on_disk", step=checkpoint.step, error=error.message)
                self._checkpoints.save_locally(self._job_id, self._spec_sha, checkpoint, self._fence)
                self._on_disk = checkpoint.step
                self._saved(checkpoint.step, "disk")
            return False
        self._saved(checkpoint.step, "s3")
        return True


def _prefix(job_id: str) -> str:
    return f"jobs/{job_id}/checkpoints/"


def _encode(spec_sha: str, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files in the order in which they must be written."""
    files = {
        TENSORS: safetensors.torch.save(checkpoint.state.tensors),
        DATA: json.dumps(checkpoint.state.data).encode(),
    }
    digests = {filename: hashlib.sha256(data).hexdigest() for filename, data in files.items()}
    manifest = {"step": checkpoint.step, "spec_sha": spec_sha, "sha256": digests, "created_at": time.time()}
    return {**files, MANIFEST: json.dumps(CHECKPOINT.stamped(manifest)).encode()}


def _decode(spec_sha: str, step: int, files: Mapping[str, bytes | None]) -> Checkpoint | None:
    """None if anything is missing, torn or of another spec. Raises NewerSchema."""
    manifest, tensors, data = files[MANIFEST], files[TENSORS], files[DATA]
    if manifest is None or tensors is None or data is None:
        return None
    try:
        header = json.loads(manifest)
        CHECKPOINT.check(header.get(FIELD), f"the checkpoint after step {step}")
        digests = {TENSORS: hashlib.sha256(tensors).hexdigest(), DATA: hashlib.sha256(data).hexdigest()}
        if (header["step"], header["spec_sha"], header["sha256"]) != (step, spec_sha, digests):
            return None
        return Checkpoint(step, RunState(tensors=safetensors.torch.load(tensors), data=json.loads(data)))
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None
