"""Training sessions without a network: a manager whose work a test does by hand, with a clock of its own."""

from __future__ import annotations

import json
import threading
from typing import Any

from services.common.adapters.registry import AdapterRegistry, Manifest
from services.common.jobs.training_sessions.calls import OpenSession
from services.trainer.settings import TrainerSettings
from services.trainer.training_sessions.call_queue import CallState
from services.trainer.training_sessions.manager import TrainingSessionManager
from services.trainer.training_sessions.session import FutureView
from services.trainer.training_sessions.storage import SessionStorage
from tests.training_support import TrainingHost
from tests.unit.gateway.fake_stores import MemoryStore

INSTANCE = "0123456789ab"
DATA = [{"token_ids": [5, 6, 7, 8, 9, 10]}, {"token_ids": [11, 12, 13]}]


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Publisher:
    """The registry's part of services.trainer.runtime.publish.Publisher, without an engine."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self.registry = registry
        self.served: list[tuple[str, bool]] = []

    def publish(self, name: str, job_id: None, files: Any, *, parent: Any, metrics: Any, fence: Any) -> Manifest:
        fence()
        return self.registry.publish(name, files, base_digest="test", parent=str(parent) if parent else None)

    def serve(self, manifest: Manifest, *, attach: bool, fence: Any) -> bool:
        self.served.append((str(manifest.ref), attach))
        return attach


class Office:
    """A manager and the thread that computes."""

    def __init__(self, host: TrainingHost, clock: Clock | None = None, **settings: Any) -> None:
        self.host = host
        self.store = MemoryStore()
        self.registry = AdapterRegistry(self.store, "tiny")  # type: ignore[arg-type]
        self.publisher = Publisher(self.registry)
        storage = SessionStorage(self.store, self.registry, self.publisher, "test")  # type: ignore[arg-type]
        self.clock = clock or Clock()
        self.manager = TrainingSessionManager(
            host,  # type: ignore[arg-type]
            TrainerSettings(served_model_name="tiny", **settings),
            storage,
            instance=INSTANCE,
            clock=self.clock,
        )
        self.woken = threading.Event()
        self.manager.bind(self.woken.set)

    def compute(self) -> None:
        """Does what is there for the trainer thread, waiting a moment for what other threads bring."""
        while self.woken.wait(0.3):
            self.woken.clear()
            while self.manager.run_next():
                pass

    def open(self, **fields: Any) -> str:
        name, opened = self.manager.open(OpenSession(**fields))
        while not opened.done():
            self.woken.wait(5)
            self.woken.clear()
            self.manager.run_next()
        opened.result(0)
        return name

    def send(self, session: str, kind: str, seq: int, **fields: Any) -> FutureView:
        return self.manager.submit(session, json.dumps({"kind": kind, "seq": seq, **fields}).encode())

    def run(self, session: str, kind: str, seq: int, **fields: Any) -> dict[str, Any]:
        """Sends, computes, and gives the result. Raises what the call failed with."""
        view = self.send(session, kind, seq, **fields)
        ended = threading.Event()
        if self.manager.watch(view.id, ended.set):
            while not ended.is_set():
                self.manager.run_next()
                ended.wait(0.01)
        view = self.manager.look(view.id)
        if view.error is not None:
            raise view.error
        assert view.state is CallState.DONE
        assert view.result is not None
        return dict(json.loads(view.result))


def train(office: Office, session: str, seq: int) -> float:
    loss = office.run(session, "forward_backward", seq, loss="cross_entropy", data=DATA)["loss"]
    office.run(session, "optim_step", seq + 1, learning_rate=1e-2)
    return float(loss)
