"""Uploads of a saved checkpoint that are broken off between any two of their writes, and go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from services.common.errors import Conflict
from services.common.storage.directory_store import DirectoryStore
from services.engine.models.weights.shards import silent
from services.forge.pipeline.save import upload, uploaded
from services.trainer.evaluation.run import Retry
from tests.unit.forge.test_pipeline import files

T = TypeVar("T")
PREFIX = "forged/job-1"


class Killed(Exception):
    """The process is gone."""


def killed_after(calls: int) -> Retry:
    left = calls

    def retry(operation: Callable[[], T]) -> T:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return operation()

    return retry


def at_once(operation: Callable[[], T]) -> T:
    return operation()


def saved(directory: Path, card: str = "A card.", digest: str = "ab") -> Path:
    directory.mkdir()
    record = {"format": 1, "outputs": {"digest": digest, "files": {"README.md": card}}}
    contents = {"README.md": card, "config.json": "{}", "forge.json": json.dumps(record), "forge.json.sig": card}
    for name, text in contents.items():
        (directory / name).write_text(text)
    for shard in (1, 2):
        (directory / f"model-0000{shard}-of-00002.safetensors").write_bytes(bytes([shard]) * 64)
    return directory


def test_broken_off_anywhere_it_ends_with_the_files_and_nothing_else(tmp_path: Path) -> None:
    directory = saved(tmp_path / "saved")
    calls, broken_off = 0, True
    while broken_off:
        store = DirectoryStore(tmp_path / f"store-{calls}")
        try:
            upload(directory, store, PREFIX, silent, killed_after(calls))
            broken_off = False
        except Killed:
            whole = uploaded(store, PREFIX, at_once)
            assert whole == ("ab" if (tmp_path / f"store-{calls}" / PREFIX / "forge.json").exists() else None)
            upload(directory, store, PREFIX, silent, at_once)
        assert files(tmp_path / f"store-{calls}" / PREFIX) == files(directory)
        calls += 1
    assert calls > 8


def test_a_mark_that_is_left_beside_the_whole_goes(tmp_path: Path) -> None:
    directory, store = saved(tmp_path / "saved"), DirectoryStore(tmp_path / "store")
    for again in (lambda: upload(directory, store, PREFIX, silent, at_once), lambda: uploaded(store, PREFIX, at_once)):
        upload(directory, store, PREFIX, silent, at_once)
        store.put(f"{PREFIX}/.forging", b"ab\n")
        again()
        assert files(tmp_path / "store" / PREFIX) == files(directory)


def test_what_another_attempt_wrote_of_the_same_weights_is_replaced(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    with pytest.raises(Killed):
        upload(saved(tmp_path / "first"), store, PREFIX, silent, killed_after(4))
    assert store.get(f"{PREFIX}/README.md").data == b"A card."
    second = saved(tmp_path / "second", card="B card.")
    upload(second, store, PREFIX, silent, at_once)
    assert files(tmp_path / "store" / PREFIX) == files(second)


def test_another_checkpoint_is_not_mixed_with_one_that_is_there(tmp_path: Path) -> None:
    store, other = DirectoryStore(tmp_path / "store"), saved(tmp_path / "other", digest="cd")
    with pytest.raises(Killed):
        upload(saved(tmp_path / "first"), store, PREFIX, silent, killed_after(4))
    with pytest.raises(Conflict, match="a part of another forged checkpoint"):
        upload(other, store, PREFIX, silent, at_once)
    upload(tmp_path / "first", store, PREFIX, silent, at_once)
    with pytest.raises(Conflict, match="another forged checkpoint already"):
        upload(other, store, PREFIX, silent, at_once)
