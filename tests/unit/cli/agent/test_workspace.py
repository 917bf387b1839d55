"""Files of the workspace against paths that lead out of it, also while they change."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from cli.agent.workspace import OutsideWorkspace, Workspace

_EXCHANGE = 2


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """With a secret beside it, and links to it."""
    root = (tmp_path / "workspace").resolve()
    root.mkdir()
    (root.parent / "secret").write_text("sk-secret")
    (root.parent / "elsewhere").mkdir()
    (root / "link").symlink_to("../secret")
    (root / "absolute").symlink_to(root.parent / "secret")
    (root / "directory").symlink_to(root.parent / "elsewhere")
    (root / "file").write_text("one\ntwo\nthree\n")
    (root / "inner").symlink_to("file")
    return Workspace(root)


OUT = ("../secret", "link", "absolute", "directory/new", "a/../../secret", "/etc/passwd", "/proc/self/root/etc/passwd")


@pytest.mark.parametrize("path", OUT)
def test_nothing_is_read_or_written_outside(workspace: Workspace, path: str) -> None:
    (workspace.root / "a").mkdir()
    with pytest.raises(OutsideWorkspace):
        workspace.read(path)
    with pytest.raises(OutsideWorkspace):
        workspace.list(path if path != "directory/new" else "directory")
    if path not in ("link", "absolute"):
        with pytest.raises(OutsideWorkspace):
            workspace.write(path, "mine")
    else:  # the link is replaced, and not what it names
        workspace.write(path, "mine")
    assert (workspace.root.parent / "secret").read_text() == "sk-secret"
    assert list((workspace.root.parent / "elsewhere").iterdir()) == []


def test_files_are_read_written_and_listed(workspace: Workspace) -> None:
    root = workspace.root
    assert workspace.read("inner", 1, 1) == "two\n"
    assert workspace.read(str(root / "file")) == "one\ntwo\nthree\n"
    (root / "file").chmod(0o755)
    workspace.write("file", "new")
    workspace.write("deep/er/file", "ü")
    assert ((root / "file").read_text(), (root / "file").stat().st_mode & 0o777) == ("new", 0o755)
    assert workspace.list() == ["absolute", "deep/", "directory", "file", "inner", "link"]
    assert workspace.list("deep/er") == ["file"]
    os.mkfifo(root / "pipe")
    for path, reason in (
        ("pipe", "is not a file"),
        ("deep", "is not a file"),
        ("gone", "No such file"),
        ("", "missing"),
    ):
        with pytest.raises(OutsideWorkspace, match=reason):
            workspace.read(path)
    with pytest.raises(OutsideWorkspace, match="is a directory"):
        workspace.write("deep", "x")
    with pytest.raises(OutsideWorkspace, match="Not a directory"):
        workspace.write("file/below", "x")
    (root / "long").write_bytes(b"x" * (2**20 + 1))
    assert workspace.read("long").endswith("beyond 1048576 bytes, is not shown]")


def test_a_directory_that_becomes_a_link_meanwhile_leads_nowhere(workspace: Workspace) -> None:
    root, stop = workspace.root, threading.Event()
    (root / "flips").mkdir()
    (root / "flips" / "secret").write_text("inside")
    (root.parent / "elsewhere" / "secret").write_text("sk-secret")
    (root / "other").symlink_to(root.parent / "elsewhere")

    libc = ctypes.CDLL(None, use_errno=True)

    def flip() -> None:
        while not stop.is_set():
            assert libc.renameat2(-100, bytes(root / "flips"), -100, bytes(root / "other"), _EXCHANGE) == 0

    thread = threading.Thread(target=flip)
    thread.start()
    seen = set()
    try:
        for number in range(1000):
            try:
                seen.add(workspace.read("flips/secret"))
                workspace.write(f"flips/new{number}", "x")
            except OutsideWorkspace:
                continue
    finally:
        stop.set()
        thread.join()
    assert seen <= {"inside"}
    assert os.listdir(root.parent / "elsewhere") == ["secret"]


def test_a_workspace_is_a_directory_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path.resolve()
    monkeypatch.setenv("HOME", str(root / "home"))
    (root / "home").mkdir()
    (root / "link").symlink_to(root / "home")
    for place in (root / "gone", root / "link"):
        with pytest.raises(ValueError, match="is not a directory"):
            Workspace(place)
    with pytest.raises(ValueError, match="has your home"):
        Workspace(root / "home")


def test_where_keys_are_is_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path.resolve()
    home, config = root / "homes" / "me", root / "etc" / "me"
    for directory in (home / "project", config / "temper", root / "project" / ".temper"):
        directory.mkdir(parents=True)
    (config / "temper" / "contexts.json").write_text("{}")
    (root / "project" / ".temper" / "secrets.json").write_text("{}")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    for place in (home, home.parent, config, config.parent, root / "project"):
        with pytest.raises(ValueError, match=r"choose a project's directory|choose another directory"):
            Workspace(place)
    assert Workspace(home / "project").list() == []
