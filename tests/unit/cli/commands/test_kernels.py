"""`temper kernels pack`: the process that it starts, and how its result is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from services.engine.executors.kernel_archive import read_manifest

KEY = "A" * 52


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a machine whose engine has compiled one kernel."""
    directory = tmp_path / "cache" / "triton" / KEY
    directory.mkdir(parents=True)
    (directory / "k.json").write_text(json.dumps({"target": {"arch": 90}, "triton_version": "3.7.1"}))
    (directory / "k.cubin").write_bytes(b"code")
    return {"TEMPER_CACHE_DIR": str(tmp_path / "cache")}


def test_an_archive_is_made_and_told(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    done = CliRunner().invoke(app, ["kernels", "pack", str(tmp_path), "--json"], env=environment)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {name: found[name] for name in ("arch", "triton", "kernels")} == {
        "arch": 90,
        "triton": "3.7.1",
        "kernels": 1,
    }
    assert read_manifest(Path(found["file"])).kernels == 1
    assert found["bytes"] == Path(found["file"]).stat().st_size


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card", "sm120"], "has no kernels for 120"),
        (["--card", "hopper"], "'hopper' is no class of cards"),
    ],
)
def test_what_is_not_there_is_not_packed(
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    done = CliRunner().invoke(app, ["kernels", "pack", str(tmp_path), "--json", *arguments], env=environment)
    assert done.exit_code == 2
    assert message in json.loads(done.stdout)["error"]["message"]
    assert not list(tmp_path.glob("*.tar.gz"))
