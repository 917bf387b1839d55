"""More adapter versions than slots: the engine's loop, its scheduler and the adapters' manager on a toy model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from services.common.errors import Overloaded
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.executors.runner import CompletedStep
from services.engine.loop.loop import EngineLoop
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import StepPlan
from tests.unit.engine.adapters.adapter_world import TIMEOUT, World
from tests.unit.engine.machine import ToyRunner

CONFIG = SchedulerConfig(
    max_num_seqs=16, token_budget=64, block_size=16, num_blocks=3000, num_slots=40, max_model_len=16_384
)


class PacedRunner(ToyRunner):
    """A step takes a moment, as on a device: requests come while others run."""

    def launch(self, plan: StepPlan) -> CompletedStep:
        time.sleep(0.0005)
        return super().launch(plan)


class Engine:
    def __init__(self, loop: EngineLoop, world: World) -> None:
        self.loop = loop
        self.world = world
        self.frames: SimpleQueue[list[SequenceUpdate]] = SimpleQueue()
        self.asked: dict[str, str] = {}

    def ask(self, adapter: str, tokens: int) -> str:
        name = f"r{len(self.asked)}"
        self.asked[name] = adapter
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.loop.submit(Submission(name, (1, 2, 3), sampling, AdapterChoice(name=adapter)), self.frames.put)
        return name

    def updates(self) -> list[SequenceUpdate]:
        return self.frames.get(timeout=TIMEOUT)

    def last_of(self, name: str) -> SequenceUpdate:
        while True:
            for update in self.updates():
                if update.request_id == name and update.finish_reason is not None:
                    return update


@contextmanager
def engine(slots: int, wait_seconds: float, turn_seconds: float) -> Iterator[Engine]:
    world = World(slots, wait_seconds, turn_seconds)
    for name in "abcdef":
        world.publish(name, attach=False)
    loop = EngineLoop(
        CONFIG,
        PacedRunner(CONFIG),
        world.manager,
        SliceGate(0.05),
        RolloutBuffer(1, 1.0),
        adapter_wait_seconds=wait_seconds,
    )
    loop.start()
    world.manager.start(loop)
    yield Engine(loop, world)
    loop.stop()
    world.manager.stop()
    world.loop.stop()


def test_every_version_is_served_while_all_have_requests_at_all_times() -> None:
    """Six versions in two slots; each has three clients that ask again at once, so that none is ever done by itself."""
    answers: Counter[str] = Counter()
    with engine(slots=2, wait_seconds=TIMEOUT, turn_seconds=0.01) as running:
        for adapter in "abcdef":
            for client in range(3):
                running.ask(adapter, 20 + 7 * client)
        while min(answers[adapter] for adapter in "abcdef") < 6:
            for update in running.updates():
                if update.finish_reason is None:
                    continue
                assert update.finish_reason is FinishReason.LENGTH, update.error
                adapter = running.asked[update.request_id]
                answers[adapter] += 1
                running.ask(adapter, 20 + 7 * (len(running.asked) % 3))
    assert max(answers.values()) < 12 * min(answers.values())


def test_streams_that_do_not_end_keep_their_slots_and_the_others_are_told_so() -> None:
    with engine(slots=2, wait_seconds=0.2, turn_seconds=0.01) as running:
        streams = [running.ask(adapter, 16_000) for adapter in "ab"]
        while {update.request_id for update in running.updates()} != set(streams):
            """Both have a slot."""
        refused = running.last_of(running.ask("c", 5))
        assert isinstance(refused.error, Overloaded)
        assert "none became free in 0.2 s" in refused.error.message
        # Nobody waits any more: those that have slots take requests again.
        assert running.last_of(running.ask("a", 5)).finish_reason is FinishReason.LENGTH
        waiting = running.ask("c", 5)
        running.loop.abort(streams[1])
        while isinstance(running.last_of(waiting).error, Overloaded):  # a busy machine needs longer than that
            waiting = running.ask("c", 5)
        running.loop.abort(streams[0])


def test_a_version_gives_way_beside_a_stream_that_does_not_end() -> None:
    """The version that was asked for last long ago has a stream that never ends; so another one gives up its slot."""
    with engine(slots=2, wait_seconds=8.0, turn_seconds=0.01) as running:
        stream = running.ask("a", 16_000)
        for client in range(3):
            running.ask("b", 15 + 6 * client)
        waiting = running.ask("c", 5)
        while True:
            done = [update for update in running.updates() if update.finish_reason is not None]
            for update in done:
                assert update.error is None
                if running.asked[update.request_id] == "b":
                    running.ask("b", 15 + 6 * (len(running.asked) % 3))
            if waiting in {update.request_id for update in done}:
                break
        running.loop.abort(stream)
