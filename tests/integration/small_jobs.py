"""A worker beside a small real model, for jobs that share their steps.

`python -m tests.integration.small_jobs` runs one on the checkpoint in TEMPER_SMALL_CHECKPOINT until SIGTERM; each of
its turns on the device takes TEMPER_SMALL_PAUSE seconds longer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from services.common.jobs import SftJob
from services.common.settings import CommonSettings
from services.common.telemetry.logging import configure_logging
from services.trainer.jobs import prepare_run
from services.trainer.jobs.base import JobRun
from services.trainer.settings import TrainerSettings
from tests.integration.toy import make_worker, run_until_sigterm
from tests.training_host import CountingGate, TrainingHost


def small_job(number: int, **fields: Any) -> SftJob:
    """Jobs of equal shape, each of its own data, rate and length."""
    own: dict[str, Any] = {
        "adapter": f"a{number}",
        "examples": [{"prompt": f"{n} + {number}?", "completion": f"{n + number}."} for n in range(2 + number % 3)],
        "epochs": 3 + number % 2,
        "batch_size": 2,
        "learning_rate": 0.001 * (1 + number),
        "optimizer": {"schedule": "cosine", "max_grad_norm": 0.5, "eps": 1e-3},
        "checkpoint_every": 2,
        "seed": number,
        "lora": {"rank": 4, "seed": number},
        "attach": False,
    }
    return SftJob.model_validate(own | fields)


class SlowGate(CountingGate):
    """Gate whose turns take a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with super().training():
            time.sleep(self._seconds)
            yield


class SmallHost(TrainingHost):
    """Host of small jobs.

    Args:
        pause: seconds that each turn takes longer.
    """

    def __init__(self, checkpoint: Path, pause: float = 0.0, **limits: int) -> None:
        super().__init__(checkpoint, **limits)
        self.gate: CountingGate = SlowGate(pause)


def curve_of(host: TrainingHost, spec: SftJob) -> tuple[list[float], JobRun]:
    """Losses of a job that runs alone, and its run at the end."""
    run = prepare_run(spec, host, None)
    return [run.step(index)["loss"] for index in range(run.total_steps)], run


class SmallSettings(CommonSettings):
    """Of the worker process."""

    small_checkpoint: Path
    small_pause: float = 0.0


def main() -> None:
    torch.set_num_threads(1)
    own, settings = SmallSettings(), TrainerSettings()
    configure_logging(settings, service="small")
    run_until_sigterm(make_worker(settings, SmallHost(own.small_checkpoint, own.small_pause), prepare_run))


if __name__ == "__main__":
    main()
