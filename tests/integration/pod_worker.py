"""A pod's process without its servers, to be killed: the tiny model's engine and the trainer's worker beside it, on the
stores of its environment."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from services.common.adapters.registry import AdapterRegistry
from services.common.evaluation.runs.records import GateRecord
from services.common.evaluation.runs.store import EvaluationStore
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.common.telemetry.logging import configure_logging
from services.engine.settings import EngineSettings
from services.pod.forging.job import PodForge
from services.trainer.jobs import prepare_run
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.rollout_support import TINY, running_pod


class PodSettings(CommonSettings):
    """Of the process."""

    deaths: Path | None = None
    """Directory with a file for each run of suites whose decision a process died of."""
    forge_dir: Path | None = None
    """Directory of forge jobs; None: this process takes none."""


def main() -> None:
    """Works until it is killed."""
    pod_settings, settings = PodSettings(), TrainerSettings()
    deaths = pod_settings.deaths
    configure_logging(settings, service="pod")
    if deaths is not None:
        _die_once_of_each_decision(deaths)
    store = ObjectStore(settings)
    registry = AdapterRegistry(store, settings.served_model_name)
    with running_pod(registry=registry) as pod:
        forge = None
        if pod_settings.forge_dir is not None:
            served = EngineSettings.model_validate({"model": TINY, "s3_bucket": settings.s3_bucket})
            forge = PodForge(served, pod.host, store, pod_settings.forge_dir, None)
        TrainerWorker(pod.host, settings, store=store, registry=registry, prepare=prepare_run, forge=forge).start()
        threading.Event().wait()


def _die_once_of_each_decision(deaths: Path) -> None:
    """With the evidence written, and nothing done about it yet."""
    decide = EvaluationStore.decide

    def last(self: EvaluationStore, run: str, gates: GateRecord) -> None:
        decide(self, run, gates)
        if not (deaths / run).exists():
            (deaths / run).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    EvaluationStore.decide = last  # type: ignore[method-assign]
