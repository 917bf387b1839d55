"""Object store of training sessions: what they read and write. Blocking; called in threads beside the trainer's.

A checkpoint is one object, `sessions/checkpoints/{name}.safetensors`, written by one PUT: it is there as a whole or not
at all. Its tensors are the adapter's float32 masters under PEFT's names and AdamW's moments; its metadata has the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import structlog
from safetensors import SafetensorError
from torch import Tensor

from services.common.adapters.names import AdapterVersion, parse_adapter_ref, parse_adapter_version
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry
from services.common.errors import AdapterRejected, NotFound
from services.common.jobs.training_sessions.names import checkpoint_key
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from services.common.storage.record_versions import FIELD, SESSION_CHECKPOINT
from services.trainer.runtime.publish import Publisher

_ADAPTER = "adapter."
_OPTIMIZER = "optimizer."


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session's state as copies on the CPU."""

    files: Mapping[str, bytes]
    """The adapter's PEFT files, float32."""
    optimizer: Mapping[str, Tensor]
    """Empty of a version."""
    steps: int
    parent: AdapterVersion | None
    """The version that training started from."""


class SessionStorage:
    """Versions and checkpoints.

    Args:
        base_digest: of the base model of this engine; what belongs to another one is refused.
    """

    def __init__(self, store: ObjectStore, registry: AdapterRegistry, publisher: Publisher, base_digest: str) -> None:
        self._store = store
        self._registry = registry
        self._publisher = publisher
        self._base_digest = base_digest
        self._log = structlog.get_logger("sessions")

    def check_name(self, name: str) -> None:
        """Raises InvalidRequest for a name that no adapter may have."""
        self._registry.check_new_name(name)

    def version(self, ref: str) -> Snapshot:
        """An adapter version to start from, "name" or "name@n".

        Raises:
            ModelNotFound: there is none.
            AdapterRejected: it belongs to another base model, or its files are damaged.
            Unavailable: the object store is away.
        """
        name, number = parse_adapter_ref(ref)
        version = self._registry.current(name) if number is None else AdapterVersion(name, number)
        manifest = self._registry.manifest(version)
        manifest.check_adapter("start_from")
        self._check_base(str(version), manifest.base_digest)
        return Snapshot(self._registry.files(version), {}, 0, version)

    def publish(self, name: str, snapshot: Snapshot, *, attach: bool) -> dict[str, Any]:
        """Makes a version, and returns when this engine serves it.

        Raises:
            Unavailable: the object store is away.
        """
        manifest = self._publisher.publish(
            name, None, snapshot.files, parent=snapshot.parent, metrics={"session_steps": snapshot.steps}, fence=_free
        )
        attached = self._publisher.serve(manifest, attach=attach, fence=_free)
        return {"adapter": str(manifest.ref), "digest": manifest.digest, "attached": attached}

    def save_checkpoint(self, name: str, snapshot: Snapshot) -> dict[str, Any]:
        """Keeps a checkpoint, in place of one of the same name. Raises Unavailable."""
        adapter = safetensors.torch.load(snapshot.files[WEIGHTS])
        tensors = {_ADAPTER + key: tensor for key, tensor in adapter.items()}
        tensors |= {_OPTIMIZER + key: tensor.contiguous() for key, tensor in snapshot.optimizer.items()}
        about = {
            FIELD: SESSION_CHECKPOINT.version,
            "base_digest": self._base_digest,
            "config": json.loads(snapshot.files[CONFIG]),
            "steps": snapshot.steps,
            "parent": str(snapshot.parent) if snapshot.parent is not None else None,
        }
        data = safetensors.torch.save(tensors, metadata={"about": json.dumps(about)})
        self._store.put(checkpoint_key(name), data)
        return {"checkpoint": name, "bytes": len(data), "step": snapshot.steps}

    def checkpoint(self, name: str) -> Snapshot:
        """A checkpoint to take up.

        Raises:
            NotFound: there is none of this name.
            NewerSchema: a later release wrote it.
            AdapterRejected: it is damaged or belongs to another base model.
            Unavailable: the object store is away.
        """
        try:
            data = self._store.get(checkpoint_key(name)).data
        except ObjectNotFound as error:
            raise NotFound(f"there is no checkpoint {name!r}", param="checkpoint") from error
        try:
            tensors = safetensors.torch.load(data)
            length = int.from_bytes(data[:8], "little")
            about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
            SESSION_CHECKPOINT.check(about.get(FIELD), f"checkpoint {name!r}")
            adapter = {
                key.removeprefix(_ADAPTER): tensor for key, tensor in tensors.items() if key.startswith(_ADAPTER)
            }
            parent = None
            if about["parent"] is not None:
                parent = parse_adapter_version(about["parent"])
            files = {
                WEIGHTS: safetensors.torch.save(adapter, metadata={"format": "pt"}),
                CONFIG: json.dumps(about["config"], indent=2, sort_keys=True).encode(),
            }
            steps, base_digest = int(about["steps"]), str(about["base_digest"])
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise AdapterRejected(f"checkpoint {name!r} is damaged: {error}", param="checkpoint") from error
        self._check_base(f"checkpoint {name!r}", base_digest)
        optimizer = {
            key.removeprefix(_OPTIMIZER): tensor for key, tensor in tensors.items() if key.startswith(_OPTIMIZER)
        }
        return Snapshot(files, optimizer, steps, parent)

    def _check_base(self, what: str, digest: str) -> None:
        if digest != self._base_digest:
            raise AdapterRejected(
                f"cannot continue from {what}: it belongs to base model {digest[:12]}, this engine serves "
                f"{self._base_digest[:12]}"
            )


def _free() -> None:
    """A session has no rival for its versions: nothing to prove before a write."""
