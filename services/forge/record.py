"""Record of a forged checkpoint, forge.json: what was made of what, with which data and code, and every file's digest.

It says nothing of the time: the same step on the same files writes the same bytes. Without torch.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from services.common.errors import CheckpointRejected, InvalidRequest
from services.common.security.signature import check_signature, signed
from services.common.security.sources import sources_digest
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.weights.shards import Progress, silent
from services.forge.files import FORMAT, file_digest, read_object

RECORD = "forge.json"
SIGNATURE = "forge.json.sig"
FORGE_SOURCES = ("services/forge", "services/trainer", "services/adapter_tools", "services/engine/models", "kernels")
"""Code that a forged checkpoint depends on."""


@dataclass(frozen=True, slots=True)
class Made:
    """One step of the forge, before its output is there."""

    step: str
    base: Path
    base_digest: str
    recipe: Mapping[str, Any]
    plan: Mapping[str, Any]
    """Sizes before and after."""
    data: Sequence[Mapping[str, Any]] = ()
    """Data that had a say, by name and sha256."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else is told of the step: fields of the record by their names."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """Device that it was computed on, beside the machine."""

    def content(self) -> dict[str, Any]:
        """Record but for what is known of the output, and of the steps before.

        Raises:
            OSError: the code cannot be read.
        """
        return {
            "format": FORMAT,
            "step": self.step,
            "recipe": self.recipe,
            "plan": self.plan,
            "base": {"name": self.base.resolve().name, "digest": self.base_digest},
            "data": list(self.data),
            "code": {"temper": version("temper"), "sources_sha256": sources_digest(FORGE_SOURCES)},
            "hardware": {"machine": platform.machine(), "system": platform.system(), **self.hardware},
            **self.more,
        }

    def write(self, directory: Path, key: Ed25519PrivateKey | None) -> None:
        """Writes the record, and its signature if there is a key, beside the checkpoint's files.

        Raises:
            InvalidRequest: the base's own record is of another checkpoint.
            OSError
        """
        files = {path.name: _entry(path) for path in sorted(directory.iterdir())}
        content = self.content() | {
            "outputs": {"digest": checkpoint_digest(directory), "files": files},
            "history": history(self.base, self.base_digest),
        }
        text = (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
        (directory / RECORD).write_bytes(text)
        if key is not None:
            (directory / SIGNATURE).write_bytes(signed(text, key))


def history(base: Path, base_digest: str) -> list[dict[str, Any]]:
    """Records of the steps that made a checkpoint, the first one first; none if it was not forged.

    Raises:
        InvalidRequest: its record is malformed, or of another checkpoint.
    """
    file = base / RECORD
    if not file.exists():
        return []
    content = read_object(file, "the record of a forged checkpoint")
    try:
        earlier, described = list(content.pop("history")), content["outputs"]["digest"]
    except (KeyError, TypeError) as error:
        raise InvalidRequest(f"{file} is not the record of a forged checkpoint: {error!r}", param="model") from error
    if described != base_digest:
        raise InvalidRequest(
            f"{file} describes a checkpoint of digest {str(described)[:12]}, this one's is {base_digest[:12]}: "
            "remove the record if the weights were changed on purpose",
            param="model",
        )
    return [*earlier, content]


def read_record(directory: Path) -> dict[str, Any]:
    """Record of a forged checkpoint. Raises InvalidRequest: there is none, or it is malformed."""
    return read_object(directory / RECORD, "the record of a forged checkpoint")


def described_digest(directory: Path) -> str:
    """Digest that the record of a checkpoint says the weights have. Raises InvalidRequest."""
    return str(read_record(directory)["outputs"]["digest"])


def verify(directory: Path, key: Ed25519PublicKey, progress: Progress = silent) -> dict[str, Any]:
    """Checks a forged checkpoint against its signed record: each file, and that there are no others.

    Returns:
        The record.

    Raises:
        CheckpointRejected: it is not what was signed; what differs is named. Whatever cannot be checked counts as that.
    """
    try:
        text, signature = ((directory / name).read_bytes() for name in (RECORD, SIGNATURE))
    except OSError as error:
        raise CheckpointRejected(f"cannot read {error.filename}: {error.strerror}; nothing is verified") from error
    check_signature(text, signature, key)
    try:
        content = json.loads(text)
        files = {
            str(name): (str(entry["sha256"]), int(entry["size"])) for name, entry in content["outputs"]["files"].items()
        }
        if content["format"] != FORMAT:
            raise ValueError(
                f"format {content['format']!r}, and {FORMAT} is known here: take the release that wrote it"
            )
        digest = str(content["outputs"]["digest"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointRejected(f"{directory / RECORD} is no record that can be checked: {error!r}") from error
    _check_files(directory, files, progress)
    if checkpoint_digest(directory) != digest:
        raise CheckpointRejected(f"the weights of {directory} are not those of the record")
    return dict(content)


def _check_files(directory: Path, files: Mapping[str, tuple[str, int]], progress: Progress) -> None:
    try:
        found = {path.name: path for path in directory.iterdir()}
    except OSError as error:
        raise CheckpointRejected(f"cannot read {directory}: {error.strerror}") from error
    wanted = {*files, RECORD, SIGNATURE}
    for names, what in ((found.keys() - wanted, "not in the record"), (wanted - found.keys(), "missing")):
        if names:
            raise CheckpointRejected(f"files of {directory} are {what}: {', '.join(sorted(names))}")
    total = sum(size for _, size in files.values())
    done = 0
    for name, (sha256, size) in sorted(files.items()):
        path = found[name]
        if path.is_symlink() or not path.is_file():
            raise CheckpointRejected(f"{path} is not a plain file")
        if path.stat().st_size != size or file_digest(path) != sha256:
            raise CheckpointRejected(f"{path} is not the file of the record")
        done += size
        progress("verifying", done, total)


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": file_digest(path), "size": path.stat().st_size}
