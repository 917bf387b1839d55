"""Programs of the calls, each a sequence of parts: some compute on the trainer thread, some wait for the object
store."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from services.common.errors import InvalidRequest
from services.common.jobs.training_sessions.calls import (
    Call,
    Forward,
    ForwardBackward,
    Load,
    OpenSession,
    OptimStep,
    Refused,
    Sample,
    Save,
)
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.adapter_run import chosen_microbatch_tokens, starting_adapter
from services.trainer.training_sessions.policy import SessionPolicy, Shape, need_of
from services.trainer.training_sessions.sampling import sample
from services.trainer.training_sessions.storage import SessionStorage, Snapshot


@dataclass(frozen=True, slots=True)
class Compute:
    """A part for the trainer thread."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Fetch:
    """A part that waits for the object store or for the engine's steps, for another thread."""

    run: Callable[[], Any]


Program: TypeAlias = Generator[Compute | Fetch, Any, dict[str, Any]]
"""Yields its parts, is sent what each returned (or thrown what it raised), and returns the call's result."""


@dataclass(eq=False, slots=True)
class ResidentSession:
    """State of a session in the trainer's memory."""

    id: str
    host: PolicyHost
    storage: SessionStorage
    base_name: str
    shape: Shape
    policy: SessionPolicy | None = None
    parent: Any = None
    """AdapterVersion | None: what the weights came from."""

    @property
    def present(self) -> SessionPolicy:
        """Raises ValueError before the session is open."""
        if self.policy is None:
            raise ValueError("the session has no weights")
        return self.policy


def shape_of(request: OpenSession, host: PolicyHost) -> Shape:
    """Shape of the computation that a session asks for."""
    return Shape(chosen_microbatch_tokens(request.max_tokens_per_microbatch, host), request.recompute)


def open_program(resident: ResidentSession, request: OpenSession) -> Program:
    """Reserves the memory and makes the adapter."""
    snapshot = None
    if request.adapter is not None or request.checkpoint is not None:
        snapshot = yield Fetch(lambda: _fetch(resident.storage, request))
    yield Compute(lambda: _take_up(resident, snapshot, request))
    return {}


def call_program(resident: ResidentSession, call: Call, interrupt: Callable[[], None]) -> Program:
    """One call of an open session.

    Args:
        interrupt: for parts that take long; raises once the session has ended.
    """
    match call:
        case Forward() | ForwardBackward():
            scoring = yield Compute(lambda: resident.present.begin(call))
            result = None
            while result is None:
                result = yield Compute(scoring.next_part)
        case OptimStep():
            result = yield Compute(lambda: resident.present.step(call))
        case Sample():
            result = yield Fetch(lambda: sample(resident.host, resident.present.lora, call, interrupt))
        case Save():
            snapshot = yield Compute(lambda: _snapshot(resident, with_optimizer=call.checkpoint is not None))
            result = yield Fetch(lambda: _save(resident.storage, call, snapshot))
        case Load():
            snapshot = yield Fetch(lambda: _fetch(resident.storage, call))
            result = yield Compute(lambda: _take_up(resident, snapshot, OpenSession()))
        case Refused():
            if call.gradient:
                yield Compute(lambda: resident.present.drop(call.seq))
            raise InvalidRequest(call.reason, param=call.param)
    return dict(result)


def _fetch(storage: SessionStorage, source: OpenSession | Load) -> Snapshot:
    if source.checkpoint is not None:
        found = storage.checkpoint(source.checkpoint)
        return replace(found, optimizer={}, steps=0) if source.fresh_optimizer else found
    if source.adapter is None:
        raise ValueError("nothing to load is named")
    return storage.version(source.adapter)


def _save(storage: SessionStorage, call: Save, snapshot: Snapshot) -> dict[str, Any]:
    if call.checkpoint is not None:
        return storage.save_checkpoint(call.checkpoint, snapshot)
    if call.name is None:
        raise ValueError("save names nothing")
    return storage.publish(call.name, snapshot, attach=call.attach)


def _snapshot(resident: ResidentSession, *, with_optimizer: bool) -> Snapshot:
    policy = resident.present
    return Snapshot(
        files=policy.lora.to_files(resident.base_name),
        optimizer=policy.optimizer.state() if with_optimizer else {},
        steps=policy.steps,
        parent=resident.parent,
    )


def _take_up(resident: ResidentSession, snapshot: Snapshot | None, request: OpenSession) -> dict[str, Any]:
    """Puts a new adapter, or what was fetched, in the place of what the session had; nothing changes if it fails.

    Both exist for a moment: that is within what is reserved to compute, which nobody does meanwhile.
    """
    host = resident.host
    lora = starting_adapter(request.lora, host, snapshot.files if snapshot is not None else None)
    graphs = host.memory_budget.reserve_session(resident.id, need_of(host, lora, resident.shape))
    try:
        policy = SessionPolicy(host, lora, resident.shape, graphs, steps=snapshot.steps if snapshot is not None else 0)
        if snapshot is not None:
            policy.optimizer.load_state(snapshot.optimizer)
    except BaseException:
        if resident.policy is not None:
            host.memory_budget.reserve_session(resident.id, need_of(host, resident.policy.lora, resident.shape))
        raise
    resident.policy, resident.parent = policy, snapshot.parent if snapshot is not None else None
    return {
        "adapter": str(resident.parent) if resident.parent is not None else None,
        "step": policy.steps,
        "rank": lora.rank,
        "parameters": lora.num_parameters(),
    }
