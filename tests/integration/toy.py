"""A small deterministic job and a host without a model, to test the life of jobs and not the mathematics.

`python -m tests.integration.toy` runs a real worker process on them until SIGTERM. A job's metadata steers it:
`sleep` (seconds a step), `steps`, `fail` (raise at this step), `refuse` (a TemperError from prepare), `evaluations`
(a file that gets a line for each evaluation), `made` (a file that gets a line where a step makes what it learns from),
`away` (whether a step needs something that is away: a file, which is there until it was).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from services.common.adapters.manifest import Lineage, LineageParent
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry
from services.common.errors import InvalidRequest, Unavailable
from services.common.jobs import JobBase, MergeJob, Spec
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.common.telemetry.logging import configure_logging
from services.common.text.tokenizer import TextCodec
from services.trainer.jobs.base import UNDER_WAY, RunState
from services.trainer.memory.budget import MemoryBudget
from services.trainer.parent_versions import ParentVersion
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.tokenizer_support import qwen_like_tokenizer

BASE_DIGEST = "b" * 64
SIZE = 64


class ToyHost:
    """The part of PolicyHost that the worker itself uses."""

    base_digest = BASE_DIGEST
    model = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, crash_marker: Path | None = None) -> None:
        self.synced: list[AdapterVersion | None] = []
        self.memory_budget = MemoryBudget(0)
        self._crash_marker = crash_marker

    @cached_property
    def codec(self) -> TextCodec:
        return TextCodec(qwen_like_tokenizer())

    def sync_adapters(self, version: AdapterVersion | None, timeout: float) -> None:
        if self._crash_marker is not None and not self._crash_marker.exists():
            self._crash_marker.touch()  # dies once, after publish and attach and before the job's end is written
            os.kill(os.getpid(), signal.SIGKILL)
        self.synced.append(version)


class ToyLora:
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def to_files(self, base_model_name: str) -> dict[str, bytes]:
        return {
            WEIGHTS: self.weights.numpy().tobytes(),
            CONFIG: json.dumps({"r": 1, "base_model_name_or_path": base_model_name}).encode(),
        }


class ToyMerge:
    """The weighted sum of its sources' weights, one source a step."""

    notes = ()

    def __init__(self, spec: MergeJob, sources: Sequence[ParentVersion]) -> None:
        self._spec, self._sources = spec, sources
        self.lora = ToyLora(torch.zeros(SIZE))
        self.total_steps = len(sources)

    @property
    def lineage(self) -> Lineage:
        parents = zip(self._sources, self._spec.sources, strict=True)
        return Lineage(
            method=self._spec.method,
            parents=tuple(LineageParent(version=str(o.version), weight=s.weight, digest=o.digest) for o, s in parents),
        )

    def files(self, base_model_name: str) -> dict[str, bytes]:
        return self.lora.to_files(base_model_name)

    settings: Mapping[str, float] = {}
    defaults: Mapping[str, float] = {}

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        return {}

    def examine(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        return {}

    def step(self, index: int, interrupt: Callable[[], None]) -> dict[str, float]:
        interrupt()
        time.sleep(float(self._spec.metadata.get("sleep", "0")))
        weights = torch.frombuffer(bytearray(self._sources[index].files[WEIGHTS]), dtype=torch.float32)
        self.lora.weights = self.lora.weights + self._spec.sources[index].weight * weights
        return {}

    @property
    def outcome(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass

    def state(self) -> RunState:
        return RunState(tensors={"w": self.lora.weights.clone()}, data={})

    def load_state(self, state: RunState) -> int:
        raise InvalidRequest("toy merges start over")


class ToyRun:
    """Momentum SGD towards zero with noise from a generator: any lost state changes every later bit."""

    def __init__(self, spec: JobBase, parent: Mapping[str, bytes] | None) -> None:
        self._spec = spec
        self._generator = torch.Generator().manual_seed(spec.seed)
        if parent is None:
            weights = torch.randn(SIZE, generator=self._generator)
        else:
            weights = torch.frombuffer(bytearray(parent[WEIGHTS]), dtype=torch.float32).clone()
        self.lora = ToyLora(weights)
        self._momentum = torch.zeros(SIZE)
        self._step = 0
        self._found: dict[str, float] = {}
        self.total_steps = int(spec.metadata.get("steps", "12"))
        self.notes = ("toy data",)

    lineage = None

    def files(self, base_model_name: str) -> dict[str, bytes]:
        return self.lora.to_files(base_model_name)

    @property
    def settings(self) -> Mapping[str, float]:
        return {"learning_rate": 0.05, "steps": self.total_steps, "epochs": getattr(self._spec, "epochs", None) or 1}

    @property
    def defaults(self) -> Mapping[str, float]:
        return {"epochs": 3, "learning_rate": 0.05}

    def examine(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        interrupt()
        return {"loss": float(self.lora.weights.square().mean())}

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The loss and a score that grows as it falls, if the job holds anything out."""
        if not self._spec.eval_metrics:
            return {}
        interrupt()
        if file := self._spec.metadata.get("evaluations"):
            with Path(file).open("a") as lines:
                lines.write(f"{self._step}\n")
        loss = float(self.lora.weights.square().mean())
        return {"eval_loss": loss, "eval_token_accuracy": 1 / (1 + loss)}

    def step(self, index: int, interrupt: Callable[[], None]) -> dict[str, float]:
        assert index == self._step
        if self._spec.metadata.get("fail") == str(index):
            raise KeyError("bug at this step")
        if self._spec.metadata.get("does_not_fit") == str(index):
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(180_000, 101_376, "shared memory")
        if (file := self._spec.metadata.get("made")) and not self._found:
            with Path(file).open("a") as lines:
                lines.write(f"{index}\n")
            self._found = {"made_at": float(index)}
        if index == 5 and (away := self._spec.metadata.get("away")) and Path(away).exists():
            Path(away).unlink()
            raise Unavailable("what it needs is away")
        for _ in range(10):
            interrupt()
            time.sleep(float(self._spec.metadata.get("sleep", "0")) / 10)
        noise = torch.randn(SIZE, generator=self._generator)
        gradient = self.lora.weights + 0.1 * noise
        self._momentum = 0.9 * self._momentum + gradient
        self.lora.weights = self.lora.weights - 0.05 * self._momentum
        self._step += 1
        metrics = {"loss": float(self.lora.weights.square().mean()), **self._found}
        self._found = {}
        return metrics | self.evaluate() if self._step == self.total_steps else metrics

    @property
    def outcome(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass

    def state(self) -> RunState:
        tensors = {"w": self.lora.weights.clone(), "m": self._momentum.clone(), "rng": self._generator.get_state()}
        return RunState(tensors=tensors, data={"step": self._step, UNDER_WAY: dict(self._found)})

    def load_state(self, state: RunState) -> int:
        self.lora.weights, self._momentum = state.tensors["w"], state.tensors["m"]
        self._generator.set_state(state.tensors["rng"])
        self._step, self._found = int(state.data["step"]), dict(state.data[UNDER_WAY])
        return self._step


def prepare(
    spec: Spec,
    host: Any,
    parent: Mapping[str, bytes] | None,
    sources: Sequence[ParentVersion] = (),
    interrupt: Callable[[], None] = lambda: None,
) -> Any:
    if isinstance(spec, MergeJob):
        return ToyMerge(spec, sources)
    if "refuse" in spec.metadata:
        raise InvalidRequest(spec.metadata["refuse"])
    return ToyRun(spec, parent)


def expected(spec: JobBase, parent: Mapping[str, bytes] | None = None) -> tuple[bytes, list[float]]:
    """The weights and the loss curve of a run that nothing disturbs."""
    run = ToyRun(spec.model_copy(update={"metadata": {**spec.metadata, "sleep": "0"}}), parent)
    losses = [run.step(index, lambda: None)["loss"] for index in range(run.total_steps)]
    return run.lora.to_files("")[WEIGHTS], losses


def make_worker(settings: TrainerSettings, host: Any, prepare: Any = prepare) -> TrainerWorker:
    """A worker on the stores of these settings."""
    store = ObjectStore(settings)
    registry = AdapterRegistry(store, settings.served_model_name)
    return TrainerWorker(host, settings, store=store, registry=registry, prepare=prepare)


def run_until_sigterm(worker: TrainerWorker) -> NoReturn:
    """Runs a worker in this process, and drains it at SIGTERM: exit status 0, or 1 if its time was not enough."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    worker.start()
    stop.wait()
    raise SystemExit(0 if worker.drain() else 1)


class ToySettings(CommonSettings):
    """Of the worker process."""

    toy_crash_marker: Path | None = None


def main() -> None:
    settings = TrainerSettings()
    configure_logging(settings, service="toy")
    run_until_sigterm(make_worker(settings, ToyHost(ToySettings().toy_crash_marker)))


if __name__ == "__main__":
    main()
