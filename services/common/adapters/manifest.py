"""Manifest of an adapter version, manifest.json: its files and its origin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.common.adapters.evidence import GateEvidence
from services.common.adapters.names import AdapterVersion
from services.common.errors import AdapterRejected

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PICKLED = (".bin", ".pt", ".pth")
"""Name endings of weights that torch.save wrote: reading them would run what is in them."""
SAFE_ONLY = (
    f"weights are taken as {WEIGHTS} only, because reading a file of torch.save runs what is in it: load the adapter "
    "with PEFT where you trust it, and save_pretrained(DIRECTORY) writes it so"
)
_TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02")
"""First bytes of such files, now and before torch 1.6."""


def is_pickled(data: bytes) -> bool:
    """True if weights are of torch.save, whatever they are called."""
    return data.startswith(_TORCH_SAVE)


def instead_of(path: Path) -> str | None:
    """Advice where weights are missing and there are some of torch.save."""
    if path.name != WEIGHTS:
        return None
    found = next((old for end in PICKLED if (old := path.with_suffix(end)).is_file()), None)
    return None if found is None else f"{path} does not exist, only {found.name}: {SAFE_ONLY}"


class FileEntry(BaseModel):
    """One file of a version: lower-case hex SHA-256 and size in bytes."""

    model_config = ConfigDict(frozen=True)

    sha256: str
    size: int


class LineageParent(BaseModel):
    """A version that another one was made from."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str
    """"name@n"."""
    weight: float
    digest: str
    """Digest of its weights: what it was, should it be removed."""


class Lineage(BaseModel):
    """Origin of a version that was made of several others, without training."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    method: str
    """One of services.common.jobs.MergeMethod at the time."""
    parents: tuple[LineageParent, ...]
    rank: int | None = None
    """The rank that was asked for; None: nothing was cut off."""
    density: float | None = None
    scale: float = 1.0
    seed: int = 0
    error_max: float | None = None
    """Relative Frobenius error of the layer whose delta the rank changed most."""
    error_mean: float | None = None
    """The mean over the layers."""
    worst_layer: str | None = None


class DatasetOrigin(BaseModel):
    """Data set that a job learnt from."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str
    """"name@n"."""
    digest: str
    """What it was, should a user be erased from it."""


class Manifest(BaseModel):
    """Files of a version and its origin."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    version: int
    digest: str
    """SHA-256 over the files' digests: the identity of the weights in cache keys."""
    base_digest: str
    """Digest of the base checkpoint that the adapter belongs to."""
    files: dict[str, FileEntry]
    rank: int | None = None
    job_id: str | None = None
    parent: str | None = None
    """"name@n" that training started from."""
    lineage: Lineage | None = None
    """Lineage of a version that was merged; parent is None then."""
    dataset: DatasetOrigin | None = None
    """Data set that it was trained on; None: its job had data of its own."""
    created_at: float
    """Unix seconds."""
    metrics: dict[str, float] = Field(default_factory=dict)
    gates: tuple[GateEvidence, ...] = ()
    """Decisions of the job's `publish_if` and `attach_if` on suites, with their evidence."""

    @property
    def ref(self) -> AdapterVersion:
        return AdapterVersion(self.name, self.version)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


def files_digest(entries: Mapping[str, FileEntry]) -> str:
    lines = "\n".join(f"{filename}:{entry.sha256}" for filename, entry in sorted(entries.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def stated_rank(files: Mapping[str, bytes]) -> int | None:
    """Checks the set of files; the rank that adapter_config.json states. Raises AdapterRejected."""
    if set(files) != {WEIGHTS, CONFIG}:
        raise AdapterRejected(f"an adapter has exactly the files {WEIGHTS} and {CONFIG}, got {sorted(files)}")
    rank = parsed_config(files[CONFIG]).get("r")
    return rank if isinstance(rank, int) else None


def parsed_config(data: bytes) -> dict[str, Any]:
    """The object in adapter_config.json. Raises AdapterRejected."""
    try:
        config = json.loads(data)
    except ValueError as error:
        raise AdapterRejected(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterRejected(f"{CONFIG} must be a JSON object")
    return config
