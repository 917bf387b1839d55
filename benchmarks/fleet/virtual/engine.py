"""A simulated engine: its real scheduler and prefix cache in virtual time, with a cost model in the place of a device.

A step takes what the cost model says of its plan. Steps are planned as many ahead as the real runner overlaps them, and
run one after the other. Tokens between an answer's first and last are not sent: gateways would only pass them on.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Protocol

from benchmarks.fleet.cost import CostModel
from benchmarks.fleet.subject import Subject
from benchmarks.fleet.virtual.adapters import AdapterStore, EngineAdapters
from services.common.errors import Overloaded
from services.common.pb import engine_pb2 as pb
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin
from services.engine.requests.outputs import SampledToken, SequenceUpdate
from services.engine.requests.submission import Submission
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan, StepResult
from services.engine.server.errors import to_message
from services.engine.server.protobuf import submission, update_message
from services.engine.server.recent_prompts import RecentPrompts
from services.engine.server.stream_load import StreamLoad, StreamLoads

VOCABULARY = 248_320
_LOAD_SECONDS = 0.05
"""A real engine sends a frame each step to every gateway that has a request there, and tells it of the others' load.
Here one in so many seconds is sent for nothing else: what lies between changes little, and takes long to simulate."""
GAP_STEP = 1.02
"""Ratio of the bounds of a bucket of times between tokens."""


class Receiver(Protocol):
    """A gateway's stream, as the engine sees it."""

    def deliver(self, frame: pb.EngineFrame) -> None:
        """Updates of one step."""
        ...

    def break_off(self) -> None:
        """The engine is gone."""
        ...


@dataclass(slots=True)
class _Live:
    submission: Submission
    receiver: Receiver
    token: SampledToken
    """Every token of its answer."""


@dataclass(slots=True)
class _Told:
    """What a stream's gateway is told of the other gateways' requests."""

    load: StreamLoad
    at: float = float("-inf")
    """Loop time of the last frame."""


@dataclass(slots=True)
class Work:
    """What an engine has computed."""

    steps: int = 0
    busy_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class SimulatedEngine:
    """One engine.

    Args:
        store: of its adapters; None: it serves the base only.
        skipped: tokens before the prompt of a request, by request id, which cost nothing to compute but are attended
            to: for an ideal placement, whose engines have everything cached.
        step_seconds: duration of every step; None: what the cost model says.
    """

    def __init__(
        self,
        name: str,
        subject: Subject,
        store: AdapterStore | None = None,
        skipped: Mapping[str, int] | None = None,
        step_seconds: float | None = None,
    ) -> None:
        self.name = name
        self.alive = True
        self.work = Work()
        self.first_step: float | None = None
        """Loop time at which its first step began."""
        self.gaps: Counter[int] = Counter()
        """Times between tokens: how many by the power of GAP_STEP, in microseconds, that is next below."""
        self._loop = asyncio.get_running_loop()
        self._subject = subject
        self._cost: CostModel = subject.cost
        self._skipped = skipped or {}
        self._step_seconds = step_seconds
        self._scheduler = Scheduler(subject.config, subject.depth)
        self._live: dict[str, _Live] = {}
        self._waiting: dict[str, None] = {}
        """Requests that wait for their adapter, oldest first."""
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        """Plans and their seconds, the one that runs first."""
        self._ended = float("-inf")
        """End of the latest step."""
        self._arrivals = 0
        self._prompts = RecentPrompts()
        self._boundary_calls: list[Callable[[], None]] = []
        self._loads = StreamLoads()
        self.streams: dict[Receiver, _Told] = {}
        """Streams of gateways, in the order in which they were opened."""
        self.adapters = (
            None
            if store is None
            else EngineAdapters(store, subject.adapter_slots, self._at_boundary, self._retry_waiting)
        )

    # -- from gateways

    def receive(self, frame: pb.ClientFrame, receiver: Receiver) -> None:
        """A gateway's frame."""
        if not self.alive:
            return
        if frame.WhichOneof("frame") == "submit":
            self._submit(frame.submit, receiver)
        else:
            self._abort(frame.abort.request_id)

    def join(self, receiver: Receiver) -> None:
        """A stream was opened."""

        def tell(hashes: bytes) -> None:
            told.at = self._loop.time()
            prompts = [hashes] if hashes else ()
            receiver.deliver(pb.EngineFrame(others=told.load.others.message, prompts=prompts))

        told = self.streams[receiver] = _Told(self._loads.open(tell))

    def leave(self, receiver: Receiver) -> None:
        """A stream was closed: nobody waits for its requests."""
        if (told := self.streams.pop(receiver, None)) is not None:
            told.load.close()
        for name in [name for name, live in self._live.items() if live.receiver is receiver]:
            self._abort(name)

    def status(self, request: pb.GetStatusRequest) -> pb.EngineStatus:
        """As GetStatus answers."""
        counts = self._scheduler.counts()
        return pb.EngineStatus(
            running=counts.running,
            waiting=counts.waiting + len(self._waiting),
            loaded_adapters=[] if self.adapters is None else self.adapters.loaded,
            waiting_adapters=[] if self.adapters is None else self.adapters.waiting,
            prompts=self._prompts.after(request.prompts_after),
            prompts_seen=self._prompts.seen,
            load=self._loads.total.message,
        )

    def kill(self) -> None:
        """The process ends between two instructions: nothing is said any more, and all streams break."""
        self.alive = False
        if self.adapters is not None:
            self.adapters.close()
        self._in_flight.clear()
        self._live.clear()
        for stream in tuple(self.streams):
            stream.break_off()
        self.streams.clear()

    def _submit(self, message: pb.GenerateRequest, receiver: Receiver) -> None:
        waiting = len(self._live) - self._subject.config.max_num_seqs
        if waiting >= self._subject.max_waiting:
            error = Overloaded(f"{waiting} requests wait already, the limit is {self._subject.max_waiting}")
            refused = pb.Update(
                request_id=message.request_id, finish_reason=pb.FINISH_REASON_ERROR, error=to_message(error)
            )
            receiver.deliver(pb.EngineFrame(updates=[refused]))
            return
        asked = submission(message, VOCABULARY)
        self._prompts.note(message.prefix_hashes)
        if (told := self.streams.get(receiver)) is not None:
            told.load.submitted(message)
        self._live[asked.request_id] = _Live(asked, receiver, SampledToken(asked.sampling.seed or 0, -1.0))
        if not self._pin(asked):
            self._waiting[asked.request_id] = None
        self._advance()

    def _pin(self, asked: Submission) -> bool:
        """Hands a request to the scheduler; False: its adapter is loaded first."""
        if self.adapters is None:
            pin: AdapterPin | None = BASE_PIN
        elif isinstance(asked.adapter, AdapterChoice):
            pin = self.adapters.pin(asked.adapter)
        else:
            raise ValueError("a fleet has no private versions")
        if pin is None:
            return False
        self._arrivals += 1
        self._scheduler.add(asked.pinned(pin, self._arrivals))
        return True

    def _abort(self, name: str) -> None:
        live = self._live.pop(name, None)
        if live is None:
            return
        if (told := self.streams.get(live.receiver)) is not None:
            told.load.ended(name)
        if name in self._waiting:
            del self._waiting[name]
            return
        update = self._scheduler.abort(name)
        if update is not None:
            self._release(update)

    def _retry_waiting(self) -> None:
        if not self.alive:
            return
        for name in tuple(self._waiting):
            if name in self._waiting and self._pin(self._live[name].submission):
                del self._waiting[name]
        self._advance()

    # -- steps

    def _at_boundary(self, call: Callable[[], None]) -> None:
        """Calls a function between two steps."""
        if self._in_flight:
            self._boundary_calls.append(call)
        else:
            call()

    def _advance(self) -> None:
        """Plans as many steps as may be in flight, and begins the first."""
        idle = not self._in_flight
        while len(self._in_flight) < self._subject.depth and self._scheduler.has_work:
            plan = self._scheduler.schedule(self._loop.time())
            if plan is None:
                break
            self._in_flight.append((plan, self._seconds(plan)))
        if idle and self._in_flight:
            self._begin()

    def _begin(self) -> None:
        if self.first_step is None:
            self.first_step = self._loop.time()
        self._loop.call_later(self._in_flight[0][1], self._step_ended)

    def _seconds(self, plan: StepPlan) -> float:
        """Seconds of a step, and notes what it computes."""
        decodes = prefill = 0
        context = pairs = 0.0
        skipped = self._skipped
        for chunk in plan.chunks:
            length = len(chunk.token_ids)
            start = chunk.start + (skipped.get(chunk.request.request_id, 0) if skipped else 0)
            if length == 1 and chunk.samples and chunk.start:
                decodes += 1
                context += start
            else:
                prefill += length
                pairs += length * (start + length / 2)
        self.work.decode_tokens += decodes
        self.work.prefill_tokens += prefill
        if self._step_seconds is not None:
            return self._step_seconds
        return self._cost.seconds(decodes, context, prefill, pairs)

    def _step_ended(self) -> None:
        if not self.alive:
            return
        now = self._loop.time()
        plan, seconds = self._in_flight.popleft()
        self.work.steps += 1
        self.work.busy_seconds += seconds
        tokens = [self._token(chunk.request.request_id) for chunk in plan.chunks if chunk.samples]
        updates = self._scheduler.update(plan, StepResult(tokens), now)
        decodes = plan.num_decodes
        if decodes and now - self._ended < 60.0:
            self.gaps[int(log(1e6 * (now - self._ended)) / log(GAP_STEP))] += decodes
        self._ended = now
        if self._in_flight:
            self._begin()
        self._tell(updates)
        calls, self._boundary_calls = self._boundary_calls, []
        for call in calls:
            call()
        self._advance()

    def _token(self, name: str) -> SampledToken:
        live = self._live.get(name)
        return SampledToken(0, -1.0) if live is None else live.token

    def _tell(self, updates: list[SequenceUpdate]) -> None:
        frames: dict[Receiver, list[pb.Update]] = {}
        for update in updates:
            if update.cached_tokens is None and update.finish_reason is None:
                continue
            live = self._live.get(update.request_id)
            told = None if live is None else self.streams.get(live.receiver)
            if update.finish_reason is not None:
                self._live.pop(update.request_id, None)
                self._release(update)
                if told is not None:
                    told.load.ended(update.request_id)
            elif told is not None:
                told.load.begun(update.request_id)
            if live is not None:
                frames.setdefault(live.receiver, []).append(update_message(update))
        now = self._loop.time()
        for receiver, told in self.streams.items():
            messages = frames.get(receiver)
            if messages or (told.load and now - told.at >= _LOAD_SECONDS):
                told.at = now
                receiver.deliver(pb.EngineFrame(updates=messages or (), others=told.load.others.message))

    def _release(self, update: SequenceUpdate) -> None:
        if self.adapters is not None and update.finished is not None:
            self.adapters.release(update.finished.request.pin)
