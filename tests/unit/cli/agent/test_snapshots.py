"""Snapshots of workspaces: all comes back, and links that a command put there lead nowhere."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from cli.agent import snapshots
from cli.agent.snapshots import Snapshot


def tree(root: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else "",
        )
        for path in root.rglob("*")
    }


def test_a_workspace_is_put_back(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "workspace", tmp_path / "elsewhere"
    for directory in (root / "a" / "b", root / "gone", root / "locked", elsewhere):
        directory.mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("before")
    (root / "script").write_text("run")
    (root / "script").chmod(0o755)
    (root / "link").symlink_to("a/b/file")
    (root / "locked").chmod(0o555)
    (elsewhere / "file").write_text("elsewhere")
    with socket.socket(socket.AF_UNIX) as one, Snapshot.taken(root) as snapshot:
        assert snapshot is not None
        before = tree(root)
        one.bind(str(root / "socket"))
        (root / "a" / "b" / "file").write_text("after!")
        shutil.rmtree(root / "a" / "b")
        (root / "a" / "b").symlink_to(elsewhere)
        (root / "gone").rmdir()
        (root / "gone").write_text("a file now")
        (root / "script").chmod(0o600)
        (root / "link").unlink()
        (root / "link").symlink_to(elsewhere / "file")
        (root / "new" / "deep").mkdir(parents=True)
        (root / "locked").rmdir()
        os.mkfifo(root / "locked")
        (root / "a").chmod(0)
        (root / "new").chmod(0)
        snapshot.restore()
        assert (root / "socket").exists()
    (root / "socket").unlink()
    assert tree(root) == before
    assert tree(elsewhere) == {"file": ((elsewhere / "file").stat().st_mode, "elsewhere")}


def test_a_large_workspace_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    monkeypatch.setattr(snapshots, "MOST_BYTES", 99)
    with Snapshot.taken(tmp_path) as snapshot:
        assert snapshot is None


def test_one_with_files_that_cannot_be_read_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "f").write_text("x")
    monkeypatch.setattr(shutil, "copy2", refuse)
    with Snapshot.taken(tmp_path) as snapshot:
        assert snapshot is None


def test_a_copy_is_nobody_elses_to_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with Snapshot.taken(tmp_path) as snapshot:
        assert snapshot is not None
        assert snapshot.copy.parent.stat().st_mode & 0o077 == 0
