"""Saving of a forged checkpoint: weights, tokenizer, model card and record in a directory or an object store."""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.adapter_tools.output import whole_directory
from services.common.errors import Conflict, InvalidRequest
from services.common.security.signature import signed
from services.common.storage.object_store import ObjectNotFound, ObjectStore, PreconditionFailed
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.weights.shards import RECORDS, Progress
from services.forge.files import file_digest
from services.forge.pipeline.model_card import model_card
from services.forge.pipeline.run import Forged, Inputs
from services.forge.record import RECORD, SIGNATURE, read_record
from services.trainer.evaluation.run import Retry

CARD = "README.md"
_MARK = ".forging"
"""Object that says whose an unfinished upload is."""
_LAST = ("config.json", SIGNATURE, RECORD)
"""Files without which nobody takes a checkpoint for whole: the record comes last."""


def save(forged: Forged, out: Path, key: Ed25519PrivateKey | None, progress: Progress, *, name: str = "") -> None:
    """Writes the checkpoint with its model card and its record.

    Args:
        out: directory that becomes it, whole or not at all.
        key: the record is signed with it, if there is one.
        name: title of the model card; empty: the directory's name.

    Raises:
        InvalidRequest: the directory is there already, or the disk is too small.
    """
    for left in out.parent.glob(f".{out.name}.*.partial"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    files = [path for path in sorted(forged.checkpoint.iterdir()) if path.name not in (*RECORDS, CARD)]
    total = sum(path.stat().st_size for path in files)
    done = 0
    with whole_directory(out, total) as scratch:
        for path in files:
            progress("save: writing", done, total)
            shutil.copyfile(path, scratch / path.name)
            done += path.stat().st_size
        (scratch / CARD).write_text(model_card(name or out.name, forged.made.content()), encoding="utf-8")
        forged.made.write(scratch, key)
        progress("save: writing", total, total)


def saved_record(inputs: Inputs, directory: Path, key: Ed25519PrivateKey | None) -> dict[str, Any] | None:
    """Record of a checkpoint that a run with these inputs and this key has saved; None: the directory is something
    else.

    Raises:
        InvalidRequest, CheckpointRejected: an input cannot be read.
    """
    if not (directory / RECORD).is_file():
        return None
    given = {file_digest(file) for file in (inputs.data, inputs.held_out) if file is not None}
    base, recipe = checkpoint_digest(inputs.model), inputs.settings.model_dump(mode="json")
    try:
        record = read_record(directory)
        is_of_inputs = (
            (record["step"], record["recipe"], record["base"]["digest"]) == ("forge", recipe, base)
            and {one["sha256"] for one in record["data"]} <= given
            and _suites(record) == inputs.suites.digests
        )
    except (InvalidRequest, KeyError, TypeError):
        return None
    beside, text = directory / SIGNATURE, (directory / RECORD).read_bytes()
    signature = beside.read_bytes() if beside.is_file() else None
    return record if is_of_inputs and signature == (None if key is None else signed(text, key)) else None


def _suites(record: Mapping[str, Any]) -> dict[str, str]:
    """The digests of a record's suites, by their names."""
    evaluation = record.get("evaluation")
    return {} if evaluation is None else {suite: one["digest"] for suite, one in evaluation["before"].items()}


def upload(directory: Path, store: ObjectStore, prefix: str, progress: Progress, retry: Retry) -> None:
    """Copies a saved checkpoint into an object store, file by file; the record comes last. Weights that an earlier
    attempt has uploaded are not uploaded again.

    Args:
        prefix: without a slash at its end.

    Raises:
        Conflict: another checkpoint is there, or is being written.
        Unavailable: the store is away, beyond what ``retry`` waits for.
    """
    digest = str(read_record(directory)["outputs"]["digest"])
    record = (directory / RECORD).read_bytes()
    if (there := retry(lambda: _get(store, f"{prefix}/{RECORD}"))) is not None:
        if there != record:
            raise Conflict(f"{prefix} has another forged checkpoint already: name another output, or remove it first")
        retry(lambda: store.delete(f"{prefix}/{_MARK}"))
        return
    mark = f"{digest}\n".encode()
    try:
        retry(lambda: store.put(f"{prefix}/{_MARK}", mark, if_absent=True))
    except PreconditionFailed as error:
        if retry(lambda: _get(store, f"{prefix}/{_MARK}")) != mark:
            raise Conflict(
                f"{prefix} has a part of another forged checkpoint: name another output, or remove it first"
            ) from error
    there_now = {entry.key: entry.size for entry in retry(lambda: store.list_objects(f"{prefix}/"))}
    names = sorted(path.name for path in directory.iterdir())
    ordered = [*(name for name in names if name not in _LAST), *(name for name in _LAST if name in names)]
    if foreign := sorted(there_now.keys() - {f"{prefix}/{name}" for name in (*ordered, _MARK)}):
        raise Conflict(f"{prefix} has other objects, such as {foreign[0]}: name another output, or remove them first")
    total = sum((directory / name).stat().st_size for name in ordered)
    done = 0
    for name in ordered:
        progress("save: uploading", done, total)
        path = directory / name
        # Weights of one digest and size are the same; other files may be others of the same size.
        if path.suffix != ".safetensors" or there_now.get(f"{prefix}/{name}") != path.stat().st_size:
            retry(lambda path=path: _put(store, f"{prefix}/{path.name}", path))  # type: ignore[misc]
        done += path.stat().st_size
    retry(lambda: store.delete(f"{prefix}/{_MARK}"))
    progress("save: uploading", total, total)


def discard(store: ObjectStore, prefix: str) -> None:
    """Removes what an upload has left there, the record first: what is left if it is broken off is no whole checkpoint.

    Raises:
        Unavailable: the store is away.
    """
    store.delete(f"{prefix}/{RECORD}")
    store.delete_prefix(f"{prefix}/")


def uploaded(store: ObjectStore, prefix: str, retry: Retry) -> str | None:
    """Digest of the checkpoint that an upload has left there whole; None: there is none.

    Raises:
        Unavailable: the store is away, beyond what ``retry`` waits for.
    """
    record = retry(lambda: _get(store, f"{prefix}/{RECORD}"))
    if record is None:
        return None
    retry(lambda: store.delete(f"{prefix}/{_MARK}"))
    return str(json.loads(record)["outputs"]["digest"])


def _put(store: ObjectStore, key: str, path: Path) -> None:
    if path.stat().st_size == 0:
        store.put(key, b"")
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        try:
            store.put(key, view)
        finally:
            view.release()


def _get(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key).data
    except ObjectNotFound:
        return None
