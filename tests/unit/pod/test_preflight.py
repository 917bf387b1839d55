"""A pod that cannot start says why, in one line, before anything heavy is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import CheckpointRejected, InvalidRequest, TemperError, Unavailable
from services.engine.settings import EngineSettings
from services.pod import preflight
from tests.certificates import DAY, Authority

ROOT = Path(__file__).resolve().parents[3]


def test_malformed_settings_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPER_TOKEN_BUDGET", "many")
    monkeypatch.setenv("TEMPER_JOB_MAX_ATTEMPTS", "3")
    with pytest.raises(InvalidRequest, match="TEMPER_TOKEN_BUDGET"):
        preflight.read_settings()


def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRejected, match=r"config\.json"):
        preflight.check_model_directory(EngineSettings(model=tmp_path))


def test_the_kernel_cache_is_named_before_triton_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    preflight.use_kernel_cache(EngineSettings(cache_dir=tmp_path))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    preflight.use_kernel_cache(EngineSettings(cache_dir=tmp_path))
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    with pytest.raises(InvalidRequest, match="TEMPER_CACHE_DIR"):
        preflight.use_kernel_cache(EngineSettings(cache_dir=Path("~nobody-of-that-name/x")))


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port}.*TEMPER_GRPC_PORT"):
            preflight.check_port(EngineSettings(grpc_port=port))
    preflight.check_port(EngineSettings(grpc_port=port))


def test_redis_away_names_the_url_without_the_password() -> None:
    settings = EngineSettings.model_validate({"redis_url": "redis://user:hunter2@127.0.0.1:1/0"})
    with pytest.raises(Unavailable) as caught:
        preflight.check_redis(settings)
    assert "redis://user:***@127.0.0.1:1/0" in caught.value.message
    assert "hunter2" not in caught.value.message
    assert "\n" not in caught.value.message


def test_a_malformed_redis_url() -> None:
    with pytest.raises(InvalidRequest, match="TEMPER_REDIS_URL=http://nowhere"):
        preflight.check_redis(EngineSettings.model_validate({"redis_url": "http://nowhere"}))


def test_the_store_away_names_its_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(preflight, "check_redis", lambda settings: None)
    with pytest.raises(TemperError, match=r"127\.0\.0\.1:1"):
        preflight.check_all(EngineSettings(model=tmp_path, s3_endpoint="127.0.0.1:1", grpc_port=0))


def test_the_checks_do_not_load_torch() -> None:
    script = "import sys, services.pod.__main__; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_tls_files_are_checked_before_anything_else(tmp_path: Path) -> None:
    files = Authority("ca").issue(tmp_path, "engine", begins=-9 * DAY, ends=-DAY)
    tls = {f"grpc_tls_{part}": getattr(files, part) for part in ("cert", "key", "ca")}
    with pytest.raises(InvalidRequest, match=rf"^TEMPER_GRPC_TLS_CERT: {files.cert}: .* has expired"):
        preflight.check_tls(EngineSettings.model_validate(tls))
    assert preflight.check_tls(EngineSettings()) is None
