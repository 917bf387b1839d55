"""Manifest of an adapter version, manifest.json: its files and its origin."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from services.common.adapters.drafter_form import DrafterForm
from services.common.adapters.evidence import GateEvidence
from services.common.adapters.names import AdapterVersion
from services.common.errors import AdapterRejected, InvalidRequest
from services.common.validation.json_text import parsed_json

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
DRAFTER_WEIGHTS = "drafter.safetensors"
DRAFTER_CONFIG = "drafter.json"
DRAFTER_FORMAT = 1
"""Version of the layout of both; a later one may have other tensors."""
Kind: TypeAlias = Literal["adapter", "drafter"]
"""What a version is: a LoRA adapter, or weights of the layers that draft."""
FILES: Mapping[Kind, tuple[str, str]] = {
    "adapter": (WEIGHTS, CONFIG),
    "drafter": (DRAFTER_WEIGHTS, DRAFTER_CONFIG),
}
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


def publication(job_id: str | None, step: int | None) -> str | None:
    """Name under which a job publishes its result once, or (with a step) what it is by then; None: no job does."""
    return job_id if job_id is None or step is None else f"{job_id}-step-{step}"


class Manifest(BaseModel):
    """Files of a version and its origin."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    version: int
    kind: Kind = "adapter"
    digest: str
    """SHA-256 over the files' digests: the identity of the weights in cache keys."""
    base_digest: str
    """Digest of the base checkpoint that the adapter belongs to."""
    files: dict[str, FileEntry]
    rank: int | None = None
    job_id: str | None = None
    step: int | None = None
    """Step of the job behind which it was made; None: it is the job's result, or no job made it."""
    parent: str | None = None
    """"name@n" that training started from."""
    lineage: Lineage | None = None
    """Lineage of a version that was merged; parent is None then."""
    dataset: DatasetOrigin | None = None
    """Data set that it was trained on; None: its job had data of its own."""
    created_at: float
    """Unix seconds."""
    loaded_from: str | None = None
    """Path that it was loaded from, as the call named it; None: it was trained, merged or uploaded."""
    metrics: dict[str, float] = Field(default_factory=dict)
    gates: tuple[GateEvidence, ...] = ()
    """Decisions of the job's `publish_if` and `attach_if` on suites, with their evidence."""

    @property
    def ref(self) -> AdapterVersion:
        return AdapterVersion(self.name, self.version)

    @property
    def publication(self) -> str | None:
        """Name under which its job published it once; None: no job did."""
        return publication(self.job_id, self.step)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def check_adapter(self, param: str = "adapter") -> None:
        """Raises InvalidRequest if the version is a drafter: nothing answers with one."""
        self.check_kind("adapter", param)

    def check_kind(self, kind: Kind, param: str = "adapter") -> None:
        """Raises InvalidRequest if the version is of the other kind."""
        if self.kind == kind:
            return
        if kind == "drafter":
            raise InvalidRequest(
                f"{self.ref} is an adapter, and a drafter goes on from a drafter: name one, or leave it out",
                param=param,
            )
        raise InvalidRequest(
            f"{self.ref} is a drafter, which proposes tokens and answers nothing: name an adapter; an engine "
            "drafts with it by TEMPER_DRAFTER",
            param=param,
        )


def files_digest(entries: Mapping[str, FileEntry]) -> str:
    lines = "\n".join(f"{filename}:{entry.sha256}" for filename, entry in sorted(entries.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def kind_of(files: Mapping[str, object]) -> Kind:
    """Kind of a version with these files. Raises AdapterRejected."""
    for kind, names in FILES.items():
        if set(files) == set(names):
            return kind
    said = " or ".join(f"{weights} and {config}" for weights, config in FILES.values())
    raise AdapterRejected(f"a version has exactly the files {said}, got {sorted(files)}")


def stated_rank(files: Mapping[str, bytes]) -> int | None:
    """Rank that adapter_config.json states; None: it states none, or the files are a drafter's. Raises
    AdapterRejected."""
    if CONFIG not in files:
        return None
    rank = parsed_config(files[CONFIG]).get("r")
    return rank if isinstance(rank, int) else None


def drafter_base(config: bytes, name: str = DRAFTER_CONFIG) -> str:
    """Digest of the base model that a drafter.json names.

    Args:
        name: of the file, for messages.

    Raises:
        AdapterRejected: it is no JSON object, of a later format, or names none.
    """
    stated = parsed_config(config, name)
    if stated.get("format") != DRAFTER_FORMAT:
        raise AdapterRejected(
            f"{name}: format is {stated.get('format')!r}, and this release reads {DRAFTER_FORMAT}: take a release "
            "that knows it, or train the drafter again"
        )
    digest = stated.get("base_digest")
    if not isinstance(digest, str) or not digest:
        raise AdapterRejected(f"{name}: base_digest must be the digest of the base model, got {digest!r}")
    return digest


def drafter_form(config: bytes, name: str = DRAFTER_CONFIG) -> DrafterForm:
    """Form that a drafter.json states. Raises AdapterRejected: it is no JSON object, or states none that there is."""
    return DrafterForm.read(parsed_config(config, name), name)


def parsed_config(data: bytes, name: str = CONFIG) -> dict[str, Any]:
    """The object in adapter_config.json, or in the file ``name``. Raises AdapterRejected."""
    try:
        config = parsed_json(data, allow_inf_nan=True)
    except ValueError as error:
        raise AdapterRejected(f"{name} is not JSON: {error}", param=name) from error
    if not isinstance(config, dict):
        raise AdapterRejected(f"{name} must be a JSON object", param=name)
    return config
