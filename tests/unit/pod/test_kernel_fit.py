"""A kernel that asks for more than the GPU has is a refusal in one line, at the start and of a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import kernels.gpu
from services.common.errors import DoesNotFit
from services.engine.executors.sleeping_memory import FixedMemory
from services.engine.settings import EngineSettings
from services.pod import __main__ as pod
from services.pod.parts import runner as pod_runner
from services.trainer.memory.kernel_limits import refusal_of

errors = pytest.importorskip("triton.runtime.errors")


def launch(module: str, resource: str = "shared memory", required: int = 180_000, limit: int = 166_912) -> None:
    """Fails as a launch of that module's does."""
    path = Path(kernels.gpu.__file__).parent / module
    scope = {"error": errors.OutOfResources(required, limit, resource)}
    exec(compile("def launches():\n    raise error", str(path), "exec"), scope)
    cast("Any", scope["launches"])()


class Runner:
    """Runner whose kernels do not fit."""

    captures = 0

    def __init__(self, module: str, **given: Any) -> None:
        self._module, self._given = module, given

    def warm_up(self) -> None:
        launch(self._module, **self._given)


def refusal(monkeypatch: pytest.MonkeyPatch, runner: Runner, **given: object) -> DoesNotFit:
    """What build_runner() refuses an engine with."""
    tuning = SimpleNamespace(runner=runner, cache=None, use_kept=lambda: True)
    monkeypatch.setattr(pod_runner, "gpu_tuning", lambda *_, **__: tuning)
    model, settings = SimpleNamespace(device=torch.device("cuda")), EngineSettings.model_validate(given)
    with pytest.raises(DoesNotFit) as caught:
        pod_runner.build_runner(
            cast("Any", model),
            cast("Any", None),
            settings.for_device("cuda"),
            num_blocks=2,
            max_model_len=16,
            eos_token_ids=[1],
            sleeping=FixedMemory(),
        )
    return caught.value


def test_a_start_names_the_kernel_the_limit_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, Runner("linear/skinny.py"), quantization="int4").message == (
        "the kernel of launches (kernels/gpu/linear/skinny.py) asks for 180,000 of shared memory a block, and this GPU "
        "has 166,912: try another TEMPER_QUANTIZATION than int4, another TEMPER_MAX_LORA_RANK than 32, "
        "TEMPER_TUNE=off (what was tuned is not used), TEMPER_DEVICE_LIMITS=sm89 (the cuts of cards with 99 KiB of "
        "shared memory), another GPU, or TEMPER_DEVICE=cpu"
    )


def test_what_would_not_help_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, Runner("delta/step.py", resource="threads", required=512, limit=384)).message
    assert "asks for 512 of threads" in message
    assert message.endswith("384: try another TEMPER_STATE_DTYPE than float32, another GPU, or TEMPER_DEVICE=cpu")


def test_the_pod_ends_with_that_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = refusal(monkeypatch, Runner("attention/decode.py"))

    async def fails(*_: object) -> None:
        raise error

    settings = EngineSettings(health_port=0, cache_dir=tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pod, "read_settings", lambda: (settings, None))
    for name in ("configure_logging", "end_on_signals", "check_all"):
        monkeypatch.setattr(pod, name, lambda *_, **__: None)
    monkeypatch.setattr(pod, "_run", fails)
    assert pod.main() == 1
    assert capsys.readouterr().err == f"temper engine: {error.message}\n"


def test_other_errors_stay_what_they_are() -> None:
    assert refusal_of(ValueError("another")) is None


def test_a_job_is_told_which_kernel() -> None:
    with pytest.raises(errors.OutOfResources) as caught:
        launch("train/gated_delta.py")
    found = refusal_of(caught.value)
    assert found is not None
    assert "kernels/gpu/train/gated_delta.py" in found.message
    assert found.message.endswith(
        "train on another GPU, or set TEMPER_DEVICE_LIMITS=sm89 for the engine (smaller cuts)"
    )
