"""Entries as files: crashes, damage, full disks and other owners."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload import disk
from services.engine.kv_offload.disk import DirectoryInUse, DiskFiles
from services.engine.kv_offload.entry_format import Header, entry_bytes, header_bytes
from services.engine.kv_offload.messages import Loaded, Stored
from tests.unit.engine.kv_offload.toy_device import LARGE, LAYOUT, Bench, chain, content, files, keys, limits

ROOT = Path(__file__).resolve().parents[4]
ENTRIES = chain(8, 6, 9)


def path_of(directory: Path, number: int) -> Path:
    return directory / f"{ENTRIES[number].key.hex()}.entry"


def written(directory: Path) -> Path:
    """The directory with the files of ENTRIES."""
    with Bench(limits(disk_dir=directory)) as bench:
        bench.save(*ENTRIES)
        assert not bench.counts.troubles
    return directory


def cold(directory: Path, **changes: object) -> Bench:
    """An engine that finds the directory, and does not read it into its memory by itself."""
    return Bench(limits(host=False, disk_dir=directory, **changes))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 8
    path.write_bytes(data)


def cut(path: Path, place: int) -> None:
    path.write_bytes(path.read_bytes()[:place])


HEADER = header_bytes(ENTRIES[1], LAYOUT)
LAST = entry_bytes(ENTRIES[1], LAYOUT) - 1


@pytest.mark.parametrize(
    ("damage", "place", "at_start"),
    [
        (flip, 0, True),
        (flip, 100, True),
        (flip, HEADER - 1, True),
        (flip, HEADER, False),
        (flip, HEADER + 1500, False),
        (flip, LAST, False),
        (cut, 0, True),
        (cut, 9, True),
        (cut, HEADER, True),
        (cut, LAST, True),
    ],
)
def test_a_damaged_file_is_a_miss(
    damage: Callable[[Path, int], None], place: int, at_start: bool, tmp_path: Path
) -> None:
    damage(path_of(written(tmp_path), 1), place)
    with cold(tmp_path) as bench:
        bench.settle()
        known = [event.entry for event in bench.events if isinstance(event, Stored)]
        assert known == (ENTRIES[:1] if at_start else ENTRIES)
        # What is not known is not asked for; the rest is found damaged when it is loaded.
        loaded = bench.load(*known[:2])
        assert loaded.failed == (() if at_start else (ENTRIES[1].key,))
        bench.settle()
        assert bench.counts.troubles[Tier.DISK, "damaged"] == 1
        assert bench.counts.troubles[Tier.DISK, "missing"] == (1 if at_start else 0)
        assert set(files(tmp_path)) == {path_of(tmp_path, 0).name}
        bench.save(*ENTRIES[1:])
        assert bench.load(*ENTRIES) == Loaded(2)


@pytest.mark.parametrize("damage", [flip, cut, lambda path, place: path.unlink()])
@pytest.mark.parametrize("place", [100, HEADER, LAST])
def test_damage_while_the_engine_runs(damage: Callable[[Path, int], None], place: int, tmp_path: Path) -> None:
    with cold(written(tmp_path)) as bench:
        bench.settle()
        damage(path_of(tmp_path, 1), place)
        assert bench.load(*ENTRIES[:2]).failed == (ENTRIES[1].key,)
        bench.settle()
        assert sum(bench.counts.troubles.values()) == 1
        assert set(files(tmp_path)) == {path_of(tmp_path, 0).name}


def test_a_file_under_the_name_of_another_is_a_miss(tmp_path: Path) -> None:
    written(tmp_path)
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 2).read_bytes())
    with cold(tmp_path) as bench:
        bench.settle()
        assert set(files(tmp_path)) == {path_of(tmp_path, 0).name}


def test_entries_of_another_model_are_removed_and_strange_files_are_not(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{'0' * 40}.entry.new").write_text("unfinished")
    with Bench(limits(100, disk_dir=tmp_path), layout=LARGE) as bench:
        bench.settle()
        assert bench.counts.troubles == {(Tier.DISK, "damaged"): 3}
        assert set(files(tmp_path)) == {"notes.txt"}


def test_entries_of_a_later_release_are_left_to_it(tmp_path: Path) -> None:
    later = path_of(written(tmp_path), 0)
    later.write_bytes(later.read_bytes()[:8] + (2).to_bytes(4, "little") + later.read_bytes()[12:])
    before = later.read_bytes()
    with cold(tmp_path) as bench:
        bench.settle()
        assert bench.counts.troubles[Tier.DISK, "unreadable"] == 1
    assert later.read_bytes() == before


def test_one_directory_has_one_owner(tmp_path: Path) -> None:
    with Bench(limits(disk_dir=tmp_path)), pytest.raises(DirectoryInUse, match="TEMPER_TIER_DISK_DIR"):
        Bench(limits(disk_dir=tmp_path), start=False)
    DiskFiles(tmp_path, LAYOUT).close()


def test_a_directory_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryInUse, match=r"TEMPER_TIER_DISK_DIR=.*take disk out of TEMPER_TIERS"):
        DiskFiles(tmp_path / "file" / "x", LAYOUT)


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    written(tmp_path)
    with cold(tmp_path, disk_bytes=entry_bytes(ENTRIES[0], LAYOUT)) as bench:
        bench.settle()
        assert set(files(tmp_path)) == {path_of(tmp_path, 0).name}
        assert bench.load(ENTRIES[0]) == Loaded(1)


def test_what_was_used_last_is_warm_first(tmp_path: Path) -> None:
    chains = [chain(4, 4, seed=seed) for seed in range(4)]
    with Bench(limits(disk_dir=tmp_path)) as bench:
        for entries in chains:
            bench.save(*entries)
    now = time.time()
    for seed, age in enumerate((30, 10, 40, 20)):
        for entry in chains[seed]:
            when = now - age
            os.utime(tmp_path / f"{entry.key.hex()}.entry", (when, when))
    with Bench(limits(8, disk_dir=tmp_path)) as bench:  # two pages an entry
        warm = [event.entry for event in bench.settle() if isinstance(event, Stored) and event.tier is Tier.HOST]
        assert warm == chains[1] + chains[3]
        assert bench.load(*chains[1]) == Loaded(1)
        assert bench.counts.loaded == {Tier.HOST: 7000}


class _NoSpace:
    """A disk that takes so many bytes more."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.write = os.pwritev

    def pwritev(self, descriptor: int, pieces: list[memoryview], offset: int) -> int:
        size = sum(map(len, pieces))
        if size > self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= size
        return self.write(descriptor, pieces, offset)


def test_a_full_disk_makes_do_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = chain(4, 4, seed=1), chain(4, seed=2)
    size = entry_bytes(old[0], LAYOUT)
    with Bench(limits(disk_dir=tmp_path)) as bench:
        bench.save(*old)
        namespace = _NoSpace(0)
        monkeypatch.setattr(os, "pwritev", namespace.pwritev)
        monkeypatch.setattr(DiskFiles, "remove", _freeing(namespace, size))
        bench.save(*new)
        assert set(files(tmp_path)) == {f"{entry.key.hex()}.entry" for entry in (old[0], *new)}
        assert not bench.counts.troubles
        monkeypatch.setattr(DiskFiles, "remove", lambda files, key: None)
        (tmp_path / f"{new[0].key.hex()}.entry").unlink()
        bench.save(*chain(4, seed=3))
        assert bench.counts.troubles == {(Tier.DISK, "full"): 1}
        assert not [name for name in files(tmp_path) if name.endswith(".new")]
        assert bench.load(*old) == Loaded(1)  # from the host


def _freeing(namespace: _NoSpace, size: int) -> Callable[..., None]:
    remove = DiskFiles.remove

    def removing(files: DiskFiles, key: bytes) -> None:
        remove(files, key)  # type: ignore[arg-type]
        namespace.left += size

    return removing


def test_a_file_that_is_too_large_for_the_process(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.unit.engine.kv_offload.toy_device import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "with Bench(limits(disk_dir=Path(sys.argv[1]))) as bench:\n"
        "    bench.save(*chain(8, 80))\n"
        "    assert bench.counts.troubles == {(Tier.DISK, 'full'): 1}, bench.counts.troubles\n"
        "    assert bench.load(*chain(8, 80)).failed == ()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    # The write made the others go in vain; what is there is whole.
    assert not [name for name in files(tmp_path) if name.endswith(".new")]


def test_a_disk_that_fails_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, pieces: object, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with cold(written(tmp_path)) as bench:
        bench.settle()
        monkeypatch.setattr(os, "preadv", fail)
        assert bench.load(*ENTRIES).failed == keys(ENTRIES)
        monkeypatch.undo()
        bench.settle()
        assert bench.counts.troubles[Tier.DISK, "unreadable"] >= 1
        assert files(tmp_path) == {}


def test_a_disk_that_hangs_is_a_miss_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, go_on = disk._read_into, threading.Event()

    def hang(descriptor: int, offset: int, pieces: object) -> None:
        assert go_on.wait(60)
        read(descriptor, offset, pieces)  # type: ignore[arg-type]

    with cold(written(tmp_path), load_seconds=0.2) as bench:
        bench.settle()
        monkeypatch.setattr(disk, "_read_into", hang)
        assert bench.load(*ENTRIES).failed == keys(ENTRIES)  # while it still hangs
        assert bench.counts.troubles == {(Tier.DISK, "slow"): 3}
        go_on.set()
        monkeypatch.undo()
        bench.settle()
        assert bench.load(*ENTRIES) == Loaded(2)


def test_after_a_kill_every_entry_is_whole_or_not_there(tmp_path: Path) -> None:
    """The writer is killed at random moments."""
    moments = random.Random(1)
    total = 0
    with subprocess.Popen(
        [sys.executable, "-m", "tests.unit.engine.kv_offload.crash_child", str(tmp_path)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        try:
            for seed in range(0, 12_000, 1000):
                print(seed, file=starter.stdin, flush=True)
                writer = int(starter.stdout.readline())
                time.sleep(moments.uniform(0.02, 0.25))
                os.kill(writer, signal.SIGKILL)
                assert starter.stdout.readline() == "ended\n"
                total += _check_after_kill(tmp_path)
        finally:
            os.killpg(starter.pid, signal.SIGKILL)
    assert total > 10


def _check_after_kill(directory: Path) -> int:
    """Number of entries in the directory; asserts that all are complete."""
    with Bench(limits(4000, disk_dir=directory, disk_bytes=8_000_000), layout=LARGE) as bench:
        bench.settle()
        told = [event.entry for event in bench.events if isinstance(event, Stored) and event.tier is Tier.DISK]
        for entry in told:
            assert bench.load(entry).failed == ()
        assert set(files(directory)) == {f"{entry.key.hex()}.entry" for entry in told}
        assert not bench.counts.troubles
        return len(told)


def test_large_entries_go_through_many_pieces(tmp_path: Path) -> None:
    """Reads and writes of more pieces than one system call takes."""
    (entry,) = chain(40)
    files = DiskFiles(tmp_path, LARGE)
    blocks, state = content(entry, LARGE)
    data = np.concatenate([blocks.reshape(-1), state])
    pieces = [data[start : start + 333] for start in range(0, len(data), 333)]
    assert len(pieces) > 2048
    header = Header(entry, np.zeros(11, np.int64))
    files.write(header, pieces)
    target = np.zeros_like(data)
    read = files.read(entry, [target[start : start + 301] for start in range(0, len(data), 301)])
    assert read.entry == entry
    assert np.array_equal(target, data)
    files.close()
