from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.engine.settings import EngineSettings


def test_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPER_MODEL", "/data/model")
    monkeypatch.setenv("TEMPER_KV_CACHE_BYTES", "2GiB")
    settings = EngineSettings()
    assert str(settings.model) == "/data/model"
    assert settings.kv_bytes_on_cpu == 2 * 1024**3


def test_auto_device() -> None:
    settings = EngineSettings()
    assert settings.resolved_device(cuda_available=False) == "cpu"
    assert settings.resolved_device(cuda_available=True) == "cuda"


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="TEMPER_DEVICE"):
        EngineSettings(device="cuda").resolved_device(cuda_available=False)


def test_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(ValidationError, match="token_budget"):
        EngineSettings(token_budget=8, max_num_seqs=16)


def test_secrets_do_not_print() -> None:
    settings = EngineSettings.model_validate({"redis_url": "redis://:hunter2@host:6379/0"})
    assert "hunter2" not in repr(settings)
