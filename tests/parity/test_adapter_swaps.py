"""Adapters swapped under load with fewer slots than versions: every answer is its version's own, those of turns that go
on from what was kept included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import pytest
import torch

import tests.kernels.gpu.interpreter  # noqa: F401
from benchmarks.lib.adapters import GeneratedAdapters, adapter_name
from services.common.adapters.names import AdapterVersion
from services.common.jobs import LoraSettings
from services.engine.adapters.loader import AdapterLoader
from services.engine.adapters.manager import AdapterManager
from services.engine.adapters.slot_table import AdapterConfig
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.loop.loop import EngineLoop
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.models.lora.binding import AdapterBinder
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.scheduler.config import SchedulerConfig
from tests.parity.fused_models import TINY, cuda_runner, random_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = SchedulerConfig(
    max_num_seqs=4, token_budget=96, block_size=16, num_blocks=400, num_slots=24, max_model_len=1024
)
SECONDS = 60.0
Scores = npt.NDArray[np.float64]


class Versions(GeneratedAdapters):
    """Adapters that are far apart."""

    def __init__(self, count: int) -> None:
        super().__init__(TINY, count=count, rank=4)
        self._made = {adapter_name(number): self._random(number) for number in range(count)}

    @staticmethod
    def _random(seed: int) -> dict[str, bytes]:
        params, generator = LoraParams.create(TINY, LoraSettings(rank=4)), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in params.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return params.to_files("test")

    def files(self, version: AdapterVersion) -> dict[str, bytes]:
        return self._made[version.name]


@dataclass
class Pod:
    """An engine's loop and its adapters, and requests that bring their tokens."""

    loop: EngineLoop
    frames: SimpleQueue[list[SequenceUpdate]] = field(default_factory=SimpleQueue)
    sent: int = 0

    def send(self, version: int, prompt: tuple[int, ...], given: tuple[int, ...]) -> str:
        self.sent += 1
        choice = AdapterChoice(name=adapter_name(version))
        submission = Submission(f"r{self.sent}", prompt, SamplingParams.forcing(given, 1.0), choice)
        self.loop.submit(submission, self.frames.put)
        return submission.request_id


@contextmanager
def pod(registry: Versions, slots: int, *, prefix_cache: bool, graphs: int) -> Iterator[Pod]:
    limits = replace(LIMITS, prefix_cache=prefix_cache)
    model = random_model(TINY, torch.float32, DEVICE)
    lora = LoraSlots(TINY, slots + 1, 4, torch.float32, DEVICE)
    runner = cuda_runner(model, limits, lora, largest_graph=graphs)
    loader = AdapterLoader(registry, lora, AdapterBinder(TINY, max_rank=4), base_digest="")
    adapters = AdapterManager(registry, None, loader, AdapterConfig(slots, 60.0, SECONDS))
    loop = EngineLoop(limits, runner, adapters, SliceGate(0.05), RolloutBuffer(1, 1.0))
    loop.start()
    adapters.start(loop)
    try:
        yield Pod(loop)
    finally:
        adapters.stop()
        loop.stop()


def swap(versions: int, slots: int, turns: int, length: int, answer: int, *, graphs: int = 0) -> None:
    """One conversation a version, all at once. In each turn a request is aborted in the middle of its prompt or answer
    right before, so that its slot goes to another version while steps for it may be under way."""
    registry, random = Versions(versions), np.random.default_rng(1)

    def some(count: int) -> tuple[int, ...]:
        return tuple(random.integers(6, TINY.vocab_size, count).tolist())

    news = [[(some(length), some(answer)) for _ in range(turns)] for _ in range(versions)]
    found: dict[tuple[int, int], Scores] = {}
    with pod(registry, slots, prefix_cache=True, graphs=graphs) as engine:
        histories: list[tuple[int, ...]] = [() for _ in range(versions)]
        waiting: dict[str, tuple[int, int]] = {}
        quits: set[str] = set()

        def ask(version: int, turn: int) -> None:
            new, given = news[version][turn]
            quits.add(engine.send(version, (*histories[version], *new), given))
            engine.loop.abort(f"r{engine.sent}")
            quits.add(engine.send(version, (*histories[version], *new[:3]), given))
            waiting[engine.send(version, (*histories[version], *new), given)] = (version, turn)

        for version in range(versions):
            ask(version, 0)
        reused = 0
        while waiting:
            for update in engine.frames.get(timeout=SECONDS):
                if update.request_id in quits and update.finish_reason is None:
                    engine.loop.abort(update.request_id)
                if update.request_id not in waiting or update.finish_reason is None:
                    continue
                version, turn = waiting.pop(update.request_id)
                assert update.error is None
                assert update.finished is not None
                found[version, turn] = np.array(update.finished.sampling_logprobs)
                reused += update.finished.cached_tokens
                new, given = news[version][turn]
                histories[version] = (*histories[version], *new, *given)
                if turn + 1 < turns:
                    ask(version, turn + 1)
    assert reused or turns == 1
    with pod(registry, versions, prefix_cache=False, graphs=0) as engine:

        def alone(version: int, prompt: tuple[int, ...], given: tuple[int, ...]) -> Scores:
            engine.send(version, prompt, given)
            while (update := engine.frames.get(timeout=SECONDS)[-1]).finish_reason is None:
                """Its tokens."""
            assert update.finished is not None
            return np.array(update.finished.sampling_logprobs)

        for version in range(versions):
            history: tuple[int, ...] = ()
            for turn, (new, given) in enumerate(news[version]):
                expected = alone(version, (*history, *new), given)
                history = (*history, *new, *given)
                np.testing.assert_allclose(found[version, turn], expected, atol=2e-3, err_msg=f"v{version}, {turn}")
        others = [alone(version, *news[0][0]) for version in range(1, versions)]
        assert min(np.abs(other - found[0, 0]).max() for other in others) > 0.05, "versions can be told apart"


@pytest.mark.cuda
def test_every_answer_is_its_versions_own() -> None:
    swap(versions=6, slots=2, turns=12, length=40, answer=24, graphs=4)
