"""The model directory."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from cli.doctor.findings import Finding, NotHere, failure, ok
from cli.doctor.place import Place
from services.common.errors import CheckpointRejected
from services.engine.models.checkpoint import checkpoint_digest, raw_tensors, shard_files
from services.engine.models.registry import read_config

AGAIN = "fetch it again with `temper pull`, or name another with --model or TEMPER_MODEL"
"""Way out where files are broken."""


def files(place: Place) -> Finding:
    """Configuration and weights are whole: each file is there, and as long as its header says."""
    try:
        read_config(place.model)
        shards = shard_files(place.model)
        tensors = 0
        with ExitStack() as stack:
            for file in shards:
                tensors += sum(1 for _ in raw_tensors(file, stack))
    except CheckpointRejected as error:
        return failure(f"the model cannot be used: {error.message}", AGAIN)
    size = sum(file.stat().st_size for file in shards)
    return ok(f"{place.model} has {tensors:,} tensors in {len(shards)} files, {size / 2**30:,.2f} GiB")


def digest(place: Place) -> Finding:
    """The weights are those that were asked for, where TEMPER_MODEL_DIGEST or a download says which."""
    wanted = place.up.model_digest.removeprefix("sha256:").lower()
    if wanted and wanted != "unchecked":
        try:
            found = checkpoint_digest(place.model)
        except CheckpointRejected as error:
            raise NotHere("the weights cannot be read") from error
        if found != wanted:
            return failure(
                f"the weights have the digest {found}, TEMPER_MODEL_DIGEST is {wanted}",
                "correct the digest, or fetch the model again with `temper pull`",
            )
        return ok(f"the weights have the digest of TEMPER_MODEL_DIGEST, {found[:12]}…")
    return _as_fetched(place.model)


def _as_fetched(model: Path) -> Finding:
    """Sizes against the note of the download."""
    try:
        record = json.loads((model / ".source.json").read_text())
        fetched = {str(name): int(size) for name, size, _ in record["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotHere("nothing says which weights they should be: set TEMPER_MODEL_DIGEST") from error
    for name, size in fetched.items():
        file = model / name
        if not file.is_file() or file.stat().st_size != size:
            there = f"{file.stat().st_size:,} bytes" if file.is_file() else "nothing"
            return failure(f"{name} was fetched with {size:,} bytes, and there is {there}", AGAIN)
    return ok(f"{len(fetched)} files are as they were fetched from {record.get('source')}")
