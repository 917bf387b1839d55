"""Receipt of a run: everything that its result followed from."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from services.common.adapters.manifest import Manifest
from services.common.adapters.receipts import FORMAT, digest, parted
from services.common.jobs import JobBase, PublishingSpec
from services.common.jobs.fields.dataset import OfDataset
from services.common.security.sources import TRAINING_SOURCES, sources_digest
from services.trainer.jobs.base import JobRun
from services.trainer.parent_versions import ParentVersion

_LIBRARIES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers")


def receipt_of(
    manifest: Manifest,
    spec: PublishingSpec,
    run: JobRun,
    parents: Sequence[ParentVersion],
    *,
    attempt: int,
    model: str,
    device: torch.device,
) -> dict[str, Any]:
    """Content of the receipt of a version that is about to exist.

    Args:
        model: name of the base model.
        device: that it was trained on.

    Raises:
        OSError: the code cannot be read.
    """
    kept, data = parted(spec.model_dump(mode="json"))
    learnt = spec.learnt if isinstance(spec, OfDataset) else None
    return {
        "format": FORMAT,
        "version": str(manifest.ref),
        "digest": manifest.digest,
        "files": {name: entry.sha256 for name, entry in sorted(manifest.files.items())},
        "created_at": manifest.created_at,
        "base": {"name": model, "digest": manifest.base_digest},
        "parents": [{"version": str(one.version), "digest": one.digest} for one in parents],
        "data": {"sha256": digest(data), "dataset": None if learnt is None else learnt.model_dump(mode="json")},
        "job": {"id": manifest.job_id, "attempt": attempt, "spec": kept},
        "seeds": {"job": spec.seed, **({"lora": spec.lora.seed} if isinstance(spec, JobBase) else {})},
        "settings": dict(run.settings),
        "code": {"temper": version("temper"), "sources_sha256": sources_digest(TRAINING_SOURCES)},
        "libraries": libraries(),
        "kernels": "triton" if device.type == "cuda" else "torch",
        "device": described(device),
    }


def libraries() -> dict[str, str]:
    """Versions of the libraries that compute, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def described(device: torch.device) -> dict[str, Any]:
    """A device, by what its results depend on."""
    machine = {"type": device.type, "machine": platform.machine(), "system": platform.system()}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {**machine, "name": found.name, "capability": f"{found.major}.{found.minor}"}
    return {**machine, "name": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
