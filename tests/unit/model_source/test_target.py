"""A model directory whose change was interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from services.engine.models.checkpoint import checkpoint_digest
from services.model_source.files import RemoteFile, is_wanted
from services.model_source.target import Target

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"


def staged(target: Target) -> list[RemoteFile]:
    """The tiny model, fetched and not yet moved."""
    target.path.mkdir(exist_ok=True)
    target.prepare()
    files = []
    for path in sorted(TINY.iterdir()):
        if path.is_file() and is_wanted(path.name):
            shutil.copy(path, target.staging / path.name)
            files.append(RemoteFile(path.name, path.stat().st_size, "1"))
    return files


@pytest.mark.parametrize("crash_at", range(7))
def test_a_move_that_was_interrupted_is_finished_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    target = Target(tmp_path / "model")
    files = staged(target)
    (target.path / "model-old.safetensors").write_bytes(b"old")
    replace, moved = Path.replace, 0

    def until_crash(self: Path, other: Path) -> Path:
        nonlocal moved
        if other.parent == target.path:
            if moved == crash_at:
                raise OSError(5, "crash")
            moved += 1
        return replace(self, other)

    monkeypatch.setattr(Path, "replace", until_crash)
    with pytest.raises(OSError, match="crash"):
        target.take(files, "s3://b/x")
    monkeypatch.undo()
    again = Target(tmp_path / "model")
    again.prepare()
    assert checkpoint_digest(target.path) == checkpoint_digest(TINY)
    assert not (target.path / "model-old.safetensors").exists()
    assert list(again.staging.iterdir()) == []
    assert again.has(files, "s3://b/x")


def test_what_was_not_taken_changes_nothing(tmp_path: Path) -> None:
    target = Target(tmp_path / "model")
    files = staged(target)
    again = Target(tmp_path / "model")
    again.prepare()
    assert again.digest() is None
    assert {path.name for path in again.staging.iterdir()} == {file.name for file in files}


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "a\\x.safetensors"]
)
def test_names_that_are_paths_are_refused(name: str) -> None:
    with pytest.raises(Exception, match=r"TEMPER_MODEL_SOURCE \(engine.model.source\): refused"):
        is_wanted(name)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("chat_template.jinja", True),
        ("merges.txt", True),
        ("pytorch_model.bin", False),
        ("model.pt", False),
        ("onnx/model.safetensors", False),
        (".hidden.safetensors", False),
        ("modeling_qwen.py", False),
        ("", False),
    ],
)
def test_which_files_belong_to_a_checkpoint(name: str, wanted: bool) -> None:
    assert is_wanted(name) is wanted
