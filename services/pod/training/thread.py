"""Trainer thread beside the engine, if the settings ask for one."""

from __future__ import annotations

import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import CollectorRegistry

from services.common.adapters.events import AdapterEvents
from services.common.adapters.registry import AdapterRegistry
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.grants import Granted, Grants
from services.common.pb import engine_pb2
from services.common.security.outbound import tls_context
from services.common.security.sandbox.sandbox import Sandbox
from services.common.security.sandbox.shut_in import Isolation
from services.common.security.signature import read_private_key
from services.common.storage.object_store import ObjectStore
from services.common.telemetry.tracing import NO_TRACER, Tracer
from services.engine.settings import EngineSettings
from services.pod.engine import Engine
from services.pod.forging.job import PodForge
from services.pod.host import PodHost
from services.pod.rollouts.source import EngineRollouts
from services.trainer.evaluation.judge import EngineJudge
from services.trainer.jobs import prepare_run
from services.trainer.metrics import TrainerMetrics
from services.trainer.runtime.publish import Publisher
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from services.trainer.training_sessions.manager import TrainingSessionManager
from services.trainer.training_sessions.storage import SessionStorage


class Training:
    """Starts and drains the trainer's worker; without one there is never a job."""

    def __init__(
        self,
        settings: EngineSettings,
        trainer: TrainerSettings,
        engine: Engine,
        registry: AdapterRegistry,
        store: ObjectStore,
        metrics: CollectorRegistry,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._worker: TrainerWorker | None = None
        self._drained: bool | None = None
        self.sessions: TrainingSessionManager | None = None
        self._events: AdapterEvents | None = None
        self._granted: Granted | None = None
        if settings.trainer:
            host = pod_host(settings, trainer, engine)
            self._granted = host.grants.granted
            self._events = AdapterEvents(settings)
            publisher = Publisher(registry, self._events, host, trainer.adapter_sync_seconds)
            storage = SessionStorage(store, registry, publisher, engine.base_digest)
            counters = TrainerMetrics(metrics)
            self.sessions = TrainingSessionManager(
                host, trainer, storage, instance=secrets.token_hex(6), metrics=counters
            )
            forge = PodForge(settings, host, store, trainer.forge_dir, _key(trainer.forge_key_file))
            forge.tidy()
            self._worker = TrainerWorker(
                host,
                trainer,
                store=store,
                registry=registry,
                prepare=prepare_run,
                forge=forge,
                metrics=counters,
                side=self.sessions,
                tracer=tracer,
                receipt_key=_key(trainer.receipt_key_file),
            )

    def described(self, model: engine_pb2.Model) -> engine_pb2.Model:
        """Model description for gateways, with what scorers of jobs may use in this process."""
        found = engine_pb2.Model()
        found.CopyFrom(model)
        if self._granted is not None:
            found.webhooks.allowed.extend(self._granted.prefixes)
            found.webhooks.signed = self._granted.signed
            found.webhooks.sandbox = self._granted.sandbox
        return found

    def job_id(self) -> str:
        """Id of the running job, empty when idle."""
        return (self._worker.current_job or "") if self._worker is not None else ""

    @property
    def alive(self) -> bool:
        """True if the trainer works, or there is none; asked once it has been started."""
        return self._worker is None or self._worker.alive

    def session_counts(self) -> tuple[str, int, int]:
        """This process's instance id, and the number of open training sessions and of possible ones."""
        if self.sessions is None:
            return "", 0, 0
        return self.sessions.instance, *self.sessions.counts

    def start(self) -> None:
        if self._worker is not None:
            self._worker.start()

    def stop_soon(self) -> None:
        """Tells the worker that the engine will soon refuse its rollouts."""
        if self._worker is not None:
            self._worker.stop_soon()

    def drain(self) -> bool:
        """Ends the training sessions, checkpoints and requeues the running job, and ends the thread; False: it was
        still busy."""
        if self.sessions is not None:
            self.sessions.shut_down()
        if self._worker is None:
            return True
        if self._drained is None:  # the pod does not wait a second time for a busy worker
            self._drained = self._worker.drain()
            if self._events is not None:
                self._events.close()
        return self._drained


def _key(file: Path | None) -> Ed25519PrivateKey | None:
    return None if file is None else read_private_key(file)


def pod_host(settings: EngineSettings, trainer: TrainerSettings, engine: Engine) -> PodHost:
    """Policy host of the engine, for its trainer."""
    rollouts = EngineRollouts(
        engine.loop,
        engine.adapters.private,
        vocab_size=engine.model.config.vocab_size,
        sequences=trainer.rollout_sequences,
        timeout_seconds=trainer.rollout_timeout_seconds,
    )
    return PodHost(
        model=engine.model,
        codec=engine.codec,
        base_digest=engine.base_digest,
        gate=engine.gate,
        max_train_tokens=settings.max_train_tokens,
        max_lora_rank=settings.max_lora_rank,
        train_memory_bytes=engine.memory.training,
        checkpoint=engine.checkpoint,
        adapters=engine.adapters,
        rollouts=rollouts,
        grants=Grants(webhooks_of(trainer), sandbox_of(trainer), EngineJudge(rollouts, engine.codec)),
        teacher=engine.teacher,
    )


def sandbox_of(trainer: TrainerSettings) -> Sandbox | None:
    """Sandbox of programs of answers; None: there is none. Raises SandboxUnavailable: it does not work here."""
    if trainer.sandbox == "off":
        return None
    sandbox = Sandbox(Isolation(trainer.sandbox), trainer.sandbox_programs)
    sandbox.check()
    return sandbox


def webhooks_of(trainer: TrainerSettings) -> Webhooks:
    """Webhooks that jobs of this process may send samples to."""
    secret = trainer.reward_webhook_secret
    return Webhooks(
        allowed=trainer.webhook_prefixes,
        secret=None if secret is None else secret.get_secret_value(),
        timeout_seconds=trainer.reward_webhook_timeout_seconds,
        attempts=trainer.reward_webhook_attempts,
        tls=tls_context(trainer),
        keys=trainer.keys_by_prefix,
    )
