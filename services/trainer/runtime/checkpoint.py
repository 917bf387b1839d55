"""Resumable checkpoints: in the object store, on the local disk while that is away.

Layout: `jobs/{job id}/checkpoints/{fence:08d}-{step:08d}/{state.safetensors,state.json,manifest.json}`; the manifest is
written last and holds the digest of the other two, so a torn checkpoint is never loaded. The fence is the claim's that
wrote it: owners never write to the same place, and what a later one wrote counts more than what a former one did, which
may have slept through losing the job. `{step:08d}` alone is of a release without fences, and counts as fence 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from services.common.errors import TemperError, Unavailable
from services.common.jobs.record import checkpoints_of
from services.common.storage.object_store import ObjectDamaged, ObjectNotFound, ObjectStore
from services.trainer.jobs.base import RunState
from services.trainer.runtime.local_checkpoints import Checkpoint as Checkpoint
from services.trainer.runtime.local_checkpoints import LocalCheckpoints, Place, encode, first_valid

_RETRY_SECONDS = 2.0


class CheckpointStore:
    """Reads and writes the checkpoints of jobs. ``directory`` is the local fallback. Thread-safe."""

    def __init__(self, store: ObjectStore, directory: Path, *, keep: int = 2) -> None:
        self._store = store
        self._local = LocalCheckpoints(directory)
        self._keep = keep
        self._log = structlog.get_logger("checkpoint")

    def save(self, job_id: str, spec_sha: str, checkpoint: Checkpoint, fence: int = 0) -> None:
        """Uploads, then drops older ones, never any of a later owner.

        Args:
            fence: of the claim; 0: of none.

        Raises:
            Unavailable: the object store is away.
        """
        place = checkpoint.place(fence)
        for filename, data in encode(spec_sha, checkpoint).items():
            self._store.put(f"{checkpoints_of(job_id)}{place}/{filename}", data)
        older = sorted((each for each in self._stored(job_id) if each < place), reverse=True)
        for each in older[self._keep - 1 :]:
            self._store.delete_prefix(f"{checkpoints_of(job_id)}{each}/")
        self._local.drop(job_id, place)

    def save_locally(self, job_id: str, spec_sha: str, checkpoint: Checkpoint, fence: int = 0) -> None:
        """Writes to the local disk, atomically and for good, and drops older local ones. ``fence``: see save."""
        self._local.save(job_id, spec_sha, checkpoint, fence)

    def newest(self, job_id: str, spec_sha: str, fence: int = 0) -> Checkpoint | None:
        """The newest valid checkpoint of this very spec, wherever it lies. One that is torn, or damaged in the store,
        is passed over for an older one: its steps are trained again.

        Args:
            fence: of the claim that is to go on; 0: of none.

        Raises:
            Unavailable: the object store is away and the local disk has none, or only one of an owner before the last
                one, which may have written a newer one elsewhere.
            NewerSchema: the newest one was written by a later release.
        """
        place, local = self._local.newest(job_id, spec_sha)
        try:
            newer = [each for each in self._stored(job_id) if place is None or each > place]
            return first_valid(job_id, spec_sha, newer, self._read_stored)[1] or local
        except Unavailable:
            if place is None or place.fence < fence - 1:
                raise
            return local

    def discard(self, job_id: str) -> None:
        """Removes all checkpoints of a finished job. Raises Unavailable."""
        self._local.discard(job_id)
        self._store.delete_prefix(checkpoints_of(job_id))

    def forget_old(self) -> None:
        """Removes local checkpoints that nobody came back for."""
        self._local.forget_old()

    def _stored(self, job_id: str) -> set[Place]:
        """Places of the stored checkpoints, from the keys: some servers go on listing emptied directories."""
        names = {key[len(checkpoints_of(job_id)) :].split("/")[0] for key in self._store.list(checkpoints_of(job_id))}
        return {place for name in names if (place := Place.of(name)) is not None}

    def _read_stored(self, job_id: str, place: Place, filename: str) -> bytes | None:
        """None: it is not there, or not what was written."""
        try:
            return self._store.get(f"{checkpoints_of(job_id)}{place}/{filename}").data
        except (ObjectNotFound, ObjectDamaged):
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
        self._on_disk: Checkpoint | None = None
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
        return self._waiting is None or self._waiting is self._on_disk or self._closed

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
            if self._on_disk is not checkpoint:
                self._log.warning("checkpoint.kept_on_disk", step=checkpoint.step, error=error.message)
                self._checkpoints.save_locally(self._job_id, self._spec_sha, checkpoint, self._fence)
                self._on_disk = checkpoint
                self._saved(checkpoint.step, "disk")
            return False
        self._saved(checkpoint.step, "s3")
        return True
