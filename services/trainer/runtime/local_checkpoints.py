"""Resumable checkpoints of training on the local disk, and their files.

Layout: `{job id}/{fence:08d}-{step:08d}/{state.safetensors,state.json,manifest.json}`; the manifest has the digest of
the other two, so a torn checkpoint is never loaded. `{step:08d}` alone counts as fence 0. `-begun` behind the step says
that a part of the next one is in it, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import structlog
from safetensors import SafetensorError

from services.common.storage.durable import sync_directory
from services.common.storage.record_versions import CHECKPOINT, FIELD
from services.trainer.jobs.base import RunState

TENSORS = "state.safetensors"
DATA = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"(?:(\d+)-)?(\d+)(-begun)?")
_FORGOTTEN_SECONDS = 7 * 86400
"""Age at which checkpoints of jobs that went elsewhere are removed."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run's state after ``step`` finished steps."""

    step: int
    state: RunState

    def place(self, fence: int) -> Place:
        """Where it is kept."""
        return Place(fence, self.step, self.state.under_way)


class Place(NamedTuple):
    """Fence and step of a checkpoint, which name its directory. A job goes on from the greatest."""

    fence: int
    step: int
    begun: bool = False
    """Whether a part of the next step is in it: it is not written over the one without, which is whole already."""

    @classmethod
    def of(cls, name: str) -> Place | None:
        """None: no checkpoint has this name."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found[1] or 0), int(found[2]), found[3] is not None)

    def __str__(self) -> str:
        name = f"{self.fence:08d}-{self.step:08d}" if self.fence else f"{self.step:08d}"
        return f"{name}-begun" if self.begun else name


class LocalCheckpoints:
    """Checkpoints of jobs in a directory of this machine's disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, job_id: str, spec_sha: str, checkpoint: Checkpoint, fence: int = 0) -> None:
        """Writes atomically and for good, and drops older ones.

        Args:
            fence: of the claim; 0: of none.

        Raises:
            OSError
        """
        place = checkpoint.place(fence)
        final = self._directory / job_id / str(place)
        partial = final.with_name(f"partial-{uuid.uuid4().hex}")
        partial.mkdir(parents=True)
        for filename, data in encode(spec_sha, checkpoint).items():
            with (partial / filename).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        sync_directory(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for directory in (final.parent, self._directory):  # the new names in them
            sync_directory(directory)
        self.drop(job_id, place, kept=final)

    def newest(self, job_id: str, spec_sha: str) -> tuple[Place | None, Checkpoint | None]:
        """The newest valid checkpoint of this very spec, and its place. Raises NewerSchema."""
        directory = self._directory / job_id
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
        places = [place for name in names if (place := Place.of(name)) is not None]
        return first_valid(job_id, spec_sha, places, self._read)

    def drop(self, job_id: str, place: Place, kept: Path | None = None) -> None:
        """Removes checkpoints up to a place, and what a process left that died while it wrote."""
        directory = self._directory / job_id
        if not directory.is_dir():
            return
        for path in directory.iterdir():
            other = Place.of(path.name)
            if path != kept and (other is None or other <= place):
                shutil.rmtree(path, ignore_errors=True)
        if not any(directory.iterdir()):
            directory.rmdir()

    def discard(self, job_id: str) -> None:
        """Removes all checkpoints of a finished job."""
        shutil.rmtree(self._directory / job_id, ignore_errors=True)

    def forget_old(self) -> None:
        """Removes checkpoints that nobody came back for."""
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            if path.is_dir() and time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def _read(self, job_id: str, place: Place, filename: str) -> bytes | None:
        path = self._directory / job_id / str(place) / filename
        return path.read_bytes() if path.is_file() else None


def first_valid(
    job_id: str, spec_sha: str, places: Iterable[Place], read: Callable[[str, Place, str], bytes | None]
) -> tuple[Place | None, Checkpoint | None]:
    """The checkpoint at the greatest place that has a valid one of this spec.

    Args:
        read: a file of a job's checkpoint; None: it is not there.

    Raises:
        NewerSchema: it was written by a later release.
    """
    for place in sorted(places, reverse=True):
        # What has no manifest was never whole: nothing else of it is read.
        manifest = read(job_id, place, MANIFEST)
        others = (TENSORS, DATA) if manifest is not None else ()
        files = {MANIFEST: manifest} | {filename: read(job_id, place, filename) for filename in others}
        checkpoint = decode(spec_sha, place.step, files)
        if checkpoint is not None:
            return place, checkpoint
        log = structlog.get_logger("checkpoint")
        log.warning("checkpoint.invalid", job=job_id, step=place.step, fence=place.fence)
    return None, None


def encode(spec_sha: str, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files in the order in which they must be written."""
    files = {
        TENSORS: safetensors.torch.save(checkpoint.state.tensors),
        DATA: json.dumps(checkpoint.state.data).encode(),
    }
    digests = {filename: hashlib.sha256(data).hexdigest() for filename, data in files.items()}
    manifest = {"step": checkpoint.step, "spec_sha": spec_sha, "sha256": digests, "created_at": time.time()}
    return {**files, MANIFEST: json.dumps(CHECKPOINT.stamped(manifest)).encode()}


def decode(spec_sha: str, step: int, files: Mapping[str, bytes | None]) -> Checkpoint | None:
    """None if anything is missing, torn or of another spec. Raises NewerSchema."""
    manifest, tensors, data = (files.get(filename) for filename in (MANIFEST, TENSORS, DATA))
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
