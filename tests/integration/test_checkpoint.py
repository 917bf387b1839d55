"""Checkpoints in a real S3 server and on the disk."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import pytest
import torch
from minio import Minio

from services.common.errors import Unavailable
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectDamaged, ObjectStore
from services.trainer.jobs.base import UNDER_WAY, RunState
from services.trainer.runtime.checkpoint import Checkpoint, CheckpointStore, CheckpointWriter
from tests.integration.servers import RunningServer

SHA = "5" * 64


def checkpoint(step: int, **found: float) -> Checkpoint:
    state = RunState(
        tensors={"w": torch.arange(4.0) + step, "rng": torch.Generator().manual_seed(step).get_state()},
        data={"step": step, "cursor": [1, 2], "x": 0.1, UNDER_WAY: found},
    )
    return Checkpoint(step, state)


def same(found: Checkpoint | None, wanted: Checkpoint) -> bool:
    return (
        found is not None
        and found.step == wanted.step
        and found.state.data == wanted.state.data
        and found.state.tensors.keys() == wanted.state.tensors.keys()
        and all(torch.equal(found.state.tensors[name], tensor) for name, tensor in wanted.state.tensors.items())
    )


@pytest.fixture
def checkpoints(store: ObjectStore, tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(store, tmp_path, keep=2)


def test_newest_valid_one_counts_and_two_are_kept(checkpoints: CheckpointStore, store: ObjectStore) -> None:
    assert checkpoints.newest("job-1", SHA) is None
    for step in (3, 6, 9, 12):
        checkpoints.save("job-1", SHA, checkpoint(step))
    assert {key.split("/")[3] for key in store.list("jobs/")} == {"00000009", "00000012"}
    assert same(checkpoints.newest("job-1", SHA), checkpoint(12))
    assert checkpoints.newest("job-1", "6" * 64) is None, "another spec's state is useless"
    assert checkpoints.newest("job-2", SHA) is None
    store.put("jobs/job-1/checkpoints/00000012/state.safetensors", b"torn")
    assert same(checkpoints.newest("job-1", SHA), checkpoint(9))
    store.delete("jobs/job-1/checkpoints/00000009/manifest.json")
    assert checkpoints.newest("job-1", SHA) is None
    checkpoints.discard("job-1")
    assert store.list("jobs/") == []


def test_one_that_is_damaged_or_was_never_whole_holds_up_no_job(
    checkpoints: CheckpointStore, store: ObjectStore, settings: CommonSettings
) -> None:
    """Nobody waits for a store that will never answer otherwise: older ones count, and what has no manifest is not
    looked into."""
    keys = settings.s3_access_key.get_secret_value(), settings.s3_secret_key.get_secret_value()
    client = Minio(settings.s3_endpoint, *keys, secure=False)
    for step in (3, 6):
        checkpoints.save("job-1", SHA, checkpoint(step))
    unfinished = "jobs/job-1/checkpoints/00000009/state.safetensors"
    for key in (unfinished, "jobs/job-1/checkpoints/00000006/state.json"):
        client.put_object(settings.s3_bucket, key, BytesIO(), 0, metadata={"sha256": "0" * 64})
        with pytest.raises(ObjectDamaged, match="does not match its SHA-256"):
            store.get(key)
        wanted = 6 if key == unfinished else 3
        assert same(checkpoints.newest("job-1", SHA), checkpoint(wanted))
    checkpoints.save("job-1", SHA, checkpoint(6))
    assert same(checkpoints.newest("job-1", SHA), checkpoint(6)), "it is written over"


def test_a_part_of_the_next_step_counts_more_and_is_not_written_over_the_whole_one(
    checkpoints: CheckpointStore, store: ObjectStore, tmp_path: Path
) -> None:
    for step in (3, 6):
        checkpoints.save("job-1", SHA, checkpoint(step), 1)
    begun = checkpoint(6, reward=0.5)
    checkpoints.save("job-1", SHA, begun, 1)
    assert {key.split("/")[3] for key in store.list("jobs/")} == {"00000001-00000006", "00000001-00000006-begun"}
    assert same(checkpoints.newest("job-1", SHA), begun)
    store.put("jobs/job-1/checkpoints/00000001-00000006-begun/state.safetensors", b"torn")
    assert same(checkpoints.newest("job-1", SHA), checkpoint(6))
    checkpoints.save_locally("job-1", SHA, begun, 1)
    assert same(checkpoints.newest("job-1", SHA), begun)
    checkpoints.save("job-1", SHA, checkpoint(7), 1)
    assert same(checkpoints.newest("job-1", SHA), checkpoint(7))
    assert not (tmp_path / "job-1").exists()


def test_what_an_owner_before_the_last_has_on_its_disk_does_not_count_while_the_store_is_away(
    checkpoints: CheckpointStore, s3: RunningServer
) -> None:
    """The last one may have gone on for long, elsewhere: its work would be done again, and would not count any more."""
    checkpoints.save_locally("job-1", SHA, checkpoint(4), 1)
    checkpoints.save("job-1", SHA, checkpoint(50), 2)
    checkpoints.save_locally("job-1", SHA, checkpoint(4), 1)
    with s3.down():
        assert same(checkpoints.newest("job-1", SHA, 2), checkpoint(4))
        with pytest.raises(Unavailable):
            checkpoints.newest("job-1", SHA, 3)
    assert same(checkpoints.newest("job-1", SHA, 3), checkpoint(50))


def test_disk_and_store_compete_by_step(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    checkpoints.save("job-1", SHA, checkpoint(5))
    checkpoints.save_locally("job-1", SHA, checkpoint(4))
    assert same(checkpoints.newest("job-1", SHA), checkpoint(5))
    checkpoints.save_locally("job-1", SHA, checkpoint(7))
    assert same(checkpoints.newest("job-1", SHA), checkpoint(7))
    assert len(list((tmp_path / "job-1").iterdir())) == 1
    checkpoints.save("job-1", SHA, checkpoint(8))
    assert not (tmp_path / "job-1").exists()


def test_the_writer_keeps_trying(checkpoints: CheckpointStore, s3: RunningServer, store: ObjectStore) -> None:
    saved: list[tuple[int, str]] = []
    writer = CheckpointWriter(
        checkpoints, "job-1", SHA, allowed=lambda: True, saved=lambda step, where: saved.append((step, where))
    )
    with s3.down():
        writer.submit(checkpoint(1))
        assert writer.flush(15)
        assert saved == [(1, "disk")]
        assert same(checkpoints.newest("job-1", SHA), checkpoint(1))
        with pytest.raises(Unavailable):
            checkpoints.newest("job-2", SHA)
        writer.submit(checkpoint(1, reward=0.5))
        assert writer.flush(15)
        assert same(checkpoints.newest("job-1", SHA), checkpoint(1, reward=0.5)), "of the same step, and more"
    writer.submit(checkpoint(2))
    assert writer.flush(15)
    writer.close()
    assert saved[-1] == (2, "s3")
    assert "jobs/job-1/checkpoints/00000002/manifest.json" in store.list("jobs/")


def test_a_former_owner_writes_nothing(checkpoints: CheckpointStore, store: ObjectStore) -> None:
    writer = CheckpointWriter(checkpoints, "job-1", SHA, allowed=lambda: False, saved=lambda *_: None)
    writer.submit(checkpoint(1))
    assert writer.flush(5)
    writer.close()
    assert store.list("jobs/") == []


def test_a_later_owner_counts_and_loses_nothing_to_a_former_one(
    checkpoints: CheckpointStore, store: ObjectStore, tmp_path: Path
) -> None:
    """A former owner that slept through losing its job goes on with an upload: into places of its own."""
    for step in (3, 6):
        checkpoints.save("job-1", SHA, checkpoint(step), 1)
    assert same(checkpoints.newest("job-1", SHA), checkpoint(6))
    checkpoints.save("job-1", SHA, checkpoint(8), 2)
    late = CheckpointStore(store, tmp_path / "elsewhere", keep=1)
    late.save("job-1", SHA, Checkpoint(8, RunState(data={"step": 8, "of": "the former owner"})), 1)
    late.save("job-1", SHA, checkpoint(50), 1)
    assert same(checkpoints.newest("job-1", SHA), checkpoint(8))
    late.save_locally("job-1", SHA, checkpoint(60), 1)
    assert same(late.newest("job-1", SHA), checkpoint(8)), "on its own disk neither"
    checkpoints.save("job-1", SHA, checkpoint(9), 2)
    assert {key.split("/")[3] for key in store.list("jobs/")} == {"00000002-00000008", "00000002-00000009"}
    checkpoints.discard("job-1")
    assert store.list("jobs/") == []


def test_a_checkpoint_of_a_release_without_fences_is_gone_on_from(
    checkpoints: CheckpointStore, store: ObjectStore
) -> None:
    checkpoints.save("job-1", SHA, checkpoint(7))
    assert {key.split("/")[3] for key in store.list("jobs/")} == {"00000007"}
    assert same(checkpoints.newest("job-1", SHA), checkpoint(7))
    checkpoints.save("job-1", SHA, checkpoint(2), 1)
    assert same(checkpoints.newest("job-1", SHA), checkpoint(2))


def test_names_on_the_disk_are_synchronized_too(checkpoints: CheckpointStore, tmp_path: Path, monkeypatch) -> None:
    """A checkpoint that was renamed into place would otherwise be gone behind a power cut."""
    synchronized: list[str] = []

    def fsync(handle: int) -> None:
        synchronized.append(str(Path(f"/proc/self/fd/{handle}").readlink().relative_to(tmp_path)))
        real(handle)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    checkpoints.save_locally("job-1", SHA, checkpoint(4), 3)
    partial, *parents = synchronized[-3:]
    assert partial.startswith("job-1/partial-")
    assert parents == ["job-1", "."]
    assert (tmp_path / "job-1" / "00000003-00000004").is_dir()
