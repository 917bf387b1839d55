"""Settings that a device cannot run are refused at start, with the variable and what to set instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import InvalidRequest
from services.engine.models.config import Float8Scales
from services.engine.models.registry import read_config
from services.engine.settings import EngineSettings
from services.pod.device import Device, check_device, with_quantization

H200 = Device("cuda", "NVIDIA H200", (9, 0), "3.6.0")
A100 = Device("cuda", "NVIDIA A100", (8, 0), "3.10.1")
T4 = Device("cuda", "Tesla T4", (7, 5), "3.6.0")
CPU = Device("cpu")
BARE = Device("cuda", "NVIDIA H200", (9, 0))
OLD = Device("cuda", "NVIDIA H200", (9, 0), "3.5.1+git1")
TINY = read_config("models/tiny")


def settings(**given: object) -> EngineSettings:
    return EngineSettings.model_validate(given)


@pytest.mark.parametrize(
    ("device", "given"),
    [
        (CPU, {}),
        (A100, {"quantization": "int4", "state_dtype": "bfloat16", "batch_invariant": True}),
        (H200, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ],
)
def test_accepts(device: Device, given: dict[str, object], tmp_path: Path) -> None:
    check_device(settings(cache_dir=tmp_path / "new", **given), device)


@pytest.mark.parametrize(
    ("device", "float8", "given", "chosen"),
    [
        (H200, True, {}, "fp8"),
        (A100, True, {}, "none"),
        (CPU, True, {}, "none"),
        (H200, False, {}, "none"),
        (H200, True, {"quantization": "none"}, "none"),
        (A100, True, {"quantization": "int4"}, "int4"),
    ],
)
def test_a_float8_checkpoint_keeps_its_size(
    device: Device, float8: bool, given: dict[str, object], chosen: str
) -> None:
    """Where the device has float8, and nothing else is asked for."""
    config = replace(TINY, float8=Float8Scales((128, 128)) if float8 else None)
    assert with_quantization(settings(**given), device, config).quantization == chosen
    both = with_quantization(settings(quantization="none"), device, TINY, config)
    assert both.teacher_quantization == ("fp8" if float8 and device == H200 else "none")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"TEMPER_CACHE_DIR=.*cannot be kept there \(Not a directory\)"):
        check_device(settings(cache_dir=tmp_path / "file"), H200)


@pytest.mark.parametrize(
    ("device", "given", "says"),
    [
        (CPU, {"quantization": "fp8"}, "TEMPER_QUANTIZATION=fp8 needs a GPU"),
        (CPU, {"quantization": "int4"}, "TEMPER_QUANTIZATION=int4 needs a GPU"),
        (CPU, {"kv_cache_dtype": "fp8"}, "TEMPER_KV_CACHE_DTYPE=fp8 needs a GPU"),
        (CPU, {"state_dtype": "bfloat16"}, "TEMPER_STATE_DTYPE=bfloat16 needs a GPU"),
        (CPU, {"batch_invariant": True}, "TEMPER_BATCH_INVARIANT=true needs a GPU"),
        (CPU, {"train_float8": True}, "TEMPER_TRAIN_FLOAT8=true needs a GPU.*leave it at false"),
        (A100, {"prefill_float8": "mlp"}, r"TEMPER_PREFILL_FLOAT8=mlp needs .* 8\.9.*set it to none"),
        (A100, {"train_float8": True}, r"TEMPER_TRAIN_FLOAT8=true needs .* 8\.9.*unset it"),
        (A100, {"quantization": "fp8"}, r"needs compute capability 8\.9 or higher, NVIDIA A100 has .* 8\.0; use int4"),
        (A100, {"kv_cache_dtype": "fp8"}, r"TEMPER_KV_CACHE_DTYPE=fp8 needs .* 8\.9.*use auto"),
        (
            A100,
            {"speculative": "mtp", "drafter": "./wide", "draft_tokens": 8},
            "TEMPER_DRAFT_TOKENS=8: a step on a GPU checks at most 7",
        ),
        (T4, {}, r"Tesla T4 has compute capability 7\.5.*needs 8\.0.*TEMPER_DEVICE=cpu"),
        (T4, {"quantization": "int4"}, r"Tesla T4"),
        (BARE, {}, r"need Triton 3\.6 or newer, there is none: install temper\[gpu\]"),
        (OLD, {}, r"there is 3\.5\.1"),
    ],
)
def test_refuses(device: Device, given: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        check_device(settings(**given), device)
    assert "\n" not in caught.value.message
    assert caught.value.param in (*given, "device")


def test_no_gpu_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert Device.of(settings()) == CPU
    with pytest.raises(InvalidRequest, match="TEMPER_DEVICE"):
        Device.of(settings(device="cuda"))
