"""Sessions of one engine: opened, called, expired and closed; computed by whoever runs the trainer's part."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry, Manifest
from services.common.errors import (
    AdapterRejected,
    Conflict,
    DoesNotFit,
    Gone,
    InvalidRequest,
    NotFound,
    Overloaded,
    TemperError,
    Unavailable,
)
from services.common.jobs.training_sessions import OpenSession
from services.trainer.memory.budget import MemoryNeed
from services.trainer.settings import TrainerSettings
from services.trainer.training_sessions.call_queue import CallState
from services.trainer.training_sessions.manager import TrainingSessionManager
from services.trainer.training_sessions.session import FutureView
from services.trainer.training_sessions.storage import SessionStorage
from tests.training_support import TrainingHost, random_adapter
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


@pytest.fixture
def office(host: TrainingHost) -> Iterator[Office]:
    made = Office(host)
    yield made
    made.manager.shut_down()


def train(office: Office, session: str, seq: int) -> float:
    loss = office.run(session, "forward_backward", seq, loss="cross_entropy", data=DATA)["loss"]
    office.run(session, "optim_step", seq + 1, learning_rate=1e-2)
    return float(loss)


def test_a_loop_lowers_the_loss(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    losses = [train(office, session, seq) for seq in range(1, 13, 2)]
    assert losses[-1] < 0.8 * losses[0]
    described = office.manager.get(session)
    assert (described["step"], described["next_seq"], described["pending"]) == (6, 13, 0)


def test_a_rate_of_nothing_moves_nothing(office: Office) -> None:
    """The first rate of many a warm-up: the moments are made, the weights stay."""
    session = office.open(lora={"rank": 4})
    before = office.run(session, "forward_backward", 1, loss="cross_entropy", data=DATA)["loss"]
    done = office.run(session, "optim_step", 2, learning_rate=0)
    assert (done["step"], done["learning_rate"]) == (1, 0)
    assert done["grad_norm"] > 0
    assert office.run(session, "forward_backward", 3, loss="cross_entropy", data=DATA)["loss"] == before
    office.run(session, "optim_step", 4, learning_rate=1e-2)
    assert office.run(session, "forward", 5, data=DATA)["loss"] < before


def test_results_have_the_places_of_the_lists(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    data = [{"token_ids": [5, 6, 7, 8], "weights": [0, 0, 1, 2]}, {"token_ids": [5], "targets": [9]}]
    result = office.run(session, "forward", 1, data=data)
    first, second = result["logprobs"]
    assert first[:2] == [None, None]
    assert all(value < 0 for value in first[2:] + second)
    assert (len(first), len(second), result["scored_tokens"], result["num_tokens"]) == (4, 1, 3, 4)
    assert result["loss"] == pytest.approx(-(first[2] + 2 * first[3] + second[0]), rel=1e-5)


def test_calls_wait_for_their_turn_and_a_repeat_is_the_same_future(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    step = office.send(session, "optim_step", 2)
    assert (step.state, step.running, step.missing) == (CallState.PENDING, False, 1)
    office.compute()
    assert office.manager.look(step.id).state is CallState.PENDING
    first = office.send(session, "forward_backward", 1, loss="cross_entropy", data=DATA)
    assert office.send(session, "forward_backward", 1, data=DATA, loss="cross_entropy", temperature=1).id == first.id
    with pytest.raises(Conflict, match="seq 1 was used for another call"):
        office.send(session, "forward_backward", 1, loss="cross_entropy", data=DATA[:1])
    office.compute()
    assert office.manager.look(step.id).state is CallState.DONE
    assert office.send(session, "optim_step", 2).id == step.id
    assert office.manager.get(session)["step"] == 1


def test_sessions_take_turns(office: Office) -> None:
    left, right = office.open(lora={"rank": 2}), office.open(lora={"rank": 2})
    sent = [office.send(session, "forward", seq, data=DATA) for session in (left, right) for seq in (1, 2, 3)]
    order: list[str] = []
    seen: set[str] = set()
    while office.manager.run_next():
        for view in sent:
            if view.id not in seen and office.manager.look(view.id).state is CallState.DONE:
                seen.add(view.id)
                order.append(view.session)
    assert order == [left, right] * 3


def test_a_failed_backward_leaves_no_gradient_and_the_step_says_so(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    before = [p.detach().clone() for p in office.manager._sessions[session].resident.present.lora.parameters()]
    office.run(session, "forward_backward", 1, loss="cross_entropy", data=DATA)
    far = {"token_ids": [5, 6, 7], "advantages": [0, 1, 1], "logprobs": [0, -1e4, -1e4]}
    with pytest.raises(InvalidRequest, match="ratios of far-off log-probabilities overflow"):
        office.run(session, "forward_backward", 2, loss="importance_sampling", data=[far])
    with pytest.raises(InvalidRequest, match="nothing was applied: forward_backward seq 2 failed"):
        office.run(session, "optim_step", 3)
    with pytest.raises(InvalidRequest, match="there is no gradient to apply"):
        office.run(session, "optim_step", 4)
    parameters = office.manager._sessions[session].resident.present.lora.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert train(office, session, 5) > 0
    assert office.manager.get(session)["step"] == 1


def test_an_idle_session_expires_and_says_so(office: Office) -> None:
    session = office.open(lora={"rank": 4}, ttl_seconds=100)
    done = office.send(session, "forward", 1, data=DATA)
    office.compute()
    office.clock.now += 99
    office.manager.get(session)
    office.clock.now += 99
    assert office.manager.look(done.id).state is CallState.DONE
    office.clock.now += 99
    assert [found["id"] for found in office.manager.open_sessions()] == [session]
    office.clock.now += 2
    assert office.manager.open_sessions() == []
    with pytest.raises(Gone, match="expired after 100 s without a call"):
        office.manager.get(session)
    with pytest.raises(Gone, match="expired"):
        office.send(session, "forward", 2, data=DATA)
    assert office.host.memory_budget.held() == {}
    assert office.manager.look(done.id).result is not None, "what had ended can still be fetched for a while"


def test_a_session_with_calls_under_way_does_not_expire(office: Office) -> None:
    session = office.open(lora={"rank": 4}, ttl_seconds=1)
    view = office.send(session, "forward", 1, data=DATA)
    office.clock.now += 1000
    office.manager.sweep()
    office.compute()
    assert office.manager.look(view.id).state is CallState.DONE


def test_closing_fails_what_has_not_ended(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    views = [office.send(session, "forward", seq, data=DATA) for seq in (1, 2)]
    told = []
    assert office.manager.watch(views[1].id, lambda: told.append(1))
    office.manager.close(session)
    assert told == [1]
    office.compute()
    for view in views:
        found = office.manager.look(view.id)
        assert isinstance(found.error, Conflict)
    with pytest.raises(Gone, match="was closed"):
        office.manager.close(session)
    assert office.host.memory_budget.held() == {}
    assert office.manager.counts == (0, 4)


def test_shutting_down_ends_sessions_and_takes_no_more(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    view = office.send(session, "forward", 1, data=DATA)
    office.manager.shut_down()
    assert isinstance(office.manager.look(view.id).error, Unavailable)
    with pytest.raises(Gone, match="the engine shut down"):
        office.manager.get(session)
    with pytest.raises(Unavailable, match="shutting down"):
        office.manager.open(OpenSession())


def test_closed_while_it_computes(host: TrainingHost) -> None:
    office = Office(host)
    session = office.open(lora={"rank": 4}, max_tokens_per_microbatch=4)
    inside, go_on = threading.Event(), threading.Event()
    training = host.gate.training

    @contextmanager
    def slow() -> Iterator[None]:
        with training():
            inside.set()
            go_on.wait(10)
            yield

    host.gate.training = slow  # type: ignore[method-assign]
    data = [{"token_ids": list(range(10, 20))}] * 5
    view = office.send(session, "forward_backward", 1, loss="cross_entropy", data=data)
    assert office.manager.run_next()  # packs it
    trainer = threading.Thread(target=office.manager.run_next)
    trainer.start()
    assert inside.wait(10)
    office.manager.close(session)
    assert session in host.memory_budget.held(), "its memory is in use until the microbatch has ended"
    entered = host.gate.entered
    go_on.set()
    trainer.join(30)
    assert host.gate.entered == entered, "no further microbatch was begun"
    assert host.memory_budget.held() == {}
    assert isinstance(office.manager.look(view.id).error, Conflict)


def test_a_job_and_a_session_share_the_budget(checkpoint: Path) -> None:
    host = TrainingHost(checkpoint, train_memory_bytes=40 * 2**20)
    office = Office(host)
    session = office.open(lora={"rank": 16}, max_tokens_per_microbatch=64)
    resident = host.memory_budget.held()[session].resident
    assert resident == 16 * office.manager.get(session)["parameters"]
    held = host.memory_budget.held()[session]
    host.memory_budget.reserve_job(
        MemoryNeed(resident=host.memory_budget.total - held.resident - held.working, working=0)
    )
    with pytest.raises(DoesNotFit, match="the running job holds"):
        office.open(lora={"rank": 16}, max_tokens_per_microbatch=64)
    assert set(host.memory_budget.held()) == {session, "the running job"}
    assert office.manager.counts == (1, 4), "what was refused is not open"


def test_what_is_too_long_for_the_memory_is_refused_with_the_plan(checkpoint: Path) -> None:
    host = TrainingHost(checkpoint, train_memory_bytes=6 * 2**20)
    office = Office(host)
    with pytest.raises(DoesNotFit, match=r"the memory plan leaves 6\.0 MiB"):
        office.open(lora={"rank": 4}, max_tokens_per_microbatch=4096)
    session = office.open(lora={"rank": 4}, max_tokens_per_microbatch=16)
    with pytest.raises(DoesNotFit, match=r"data\[1\] with 399 tokens needs"):
        office.run(session, "forward", 1, data=[*DATA[:1], {"token_ids": [5] * 400}])


def test_limits_of_the_engine(host: TrainingHost) -> None:
    office = Office(host, sessions_max=1, session_call_tokens=600, session_ttl_max_seconds=60, session_ttl_seconds=60)
    session = office.open(lora={"rank": 4})
    with pytest.raises(Overloaded, match="1 training sessions are open in this engine, of 1"):
        office.open()
    cases: list[tuple[dict[str, Any], str, str]] = [
        (
            {"data": [{"token_ids": [5] * 513}]},
            r"data\[0\] has 513 tokens and the limit .* is 512",
            "data[0]",
        ),
        ({"data": [{"token_ids": [5, 416]}]}, r"data\[0\].token_ids has the token id 416", "data[0].token_ids"),
        ({"data": [{"token_ids": [5], "targets": [999]}]}, r"data\[0\].targets has the token id", "data[0].targets"),
        ({"data": [{"token_ids": [5] * 400}] * 2}, "the call has 800 tokens and one call may have 600", "data"),
    ]
    for fields, message, param in cases:
        with pytest.raises(InvalidRequest, match=message) as refused:
            office.send(session, "forward", 1, **fields)
        assert str(refused.value.param).startswith(param)
    assert office.manager.get(session)["next_seq"] == 1, "what is refused takes no place in the line"
    with pytest.raises(InvalidRequest, match="ttl_seconds is 61"):
        office.open(ttl_seconds=61)
    with pytest.raises(InvalidRequest, match=r"lora\.rank is 64"):
        Office(host).open(lora={"rank": 64})


def test_unknown_sessions_and_futures(office: Office) -> None:
    session = office.open(lora={"rank": 2})
    for name in ("", "nobody", f"ts-{INSTANCE}-000000000000"):
        with pytest.raises(NotFound, match="no such training session"):
            office.manager.get(name)
    other = f"ts-{'f' * 12}-000000000000"
    with pytest.raises(Gone, match="held by an engine process that has ended"):
        office.manager.get(other)
    with pytest.raises(NotFound, match="no such future"):
        office.manager.look("tf-x")
    with pytest.raises(NotFound, match="no such future"):
        office.manager.look(f"tf-{session.removeprefix('ts-')}-7-abcdef")


def test_a_result_that_is_not_kept_any_more_says_so(host: TrainingHost) -> None:
    office = Office(host, session_results=1)
    session = office.open(lora={"rank": 2})
    first = office.send(session, "forward", 1, data=DATA)
    office.compute()
    office.run(session, "forward", 2, data=DATA)
    with pytest.raises(Gone, match="was executed, and its result is not kept any more"):
        office.manager.look(first.id)
    with pytest.raises(Gone, match="was executed"):
        office.send(session, "forward", 1, data=DATA)


def test_save_and_load(office: Office) -> None:
    session = office.open(lora={"rank": 4, "seed": 3})
    train(office, session, 1)
    saved = office.run(session, "save", 3, name="mine", attach=True)
    assert (saved["adapter"], saved["attached"]) == ("mine@1", True)
    assert office.publisher.served == [("mine@1", True)]
    kept = office.run(session, "save", 4, checkpoint="half-way")
    assert (kept["checkpoint"], kept["step"]) == ("half-way", 1)
    later = [train(office, session, seq) for seq in (5, 7, 9)]

    # The same session, back to the checkpoint: bit by bit the same again, moments and all.
    assert office.run(session, "load", 11, checkpoint="half-way")["step"] == 1
    assert [train(office, session, seq) for seq in (12, 14, 16)] == later
    # A new session of it, in which nothing was configured.
    again = office.open(checkpoint="half-way")
    assert [train(office, again, seq) for seq in (1, 3, 5)] == later
    # A version has the weights and a fresh optimizer: the first loss is the same, what follows is not.
    version = office.open(adapter="mine@1")
    assert office.manager.get(version)["adapter"] == "mine@1"
    fresh = [train(office, version, seq) for seq in (1, 3, 5)]
    assert fresh[0] == later[0]
    assert fresh[2] != later[2]
    assert office.run(version, "save", 7, name="mine")["adapter"] == "mine@2"
    assert office.registry.manifest(AdapterVersion("mine", 2)).parent == "mine@1"


def test_load_forgets_gradients_and_failure_changes_nothing(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    office.run(session, "save", 1, checkpoint="start")
    office.run(session, "forward_backward", 2, loss="cross_entropy", data=DATA)
    before = office.run(session, "forward", 3, data=DATA)["loss"]
    with pytest.raises(NotFound, match="there is no checkpoint 'nothing'"):
        office.run(session, "load", 4, checkpoint="nothing")
    assert office.run(session, "forward", 5, data=DATA)["loss"] == before
    office.run(session, "load", 6, checkpoint="start")
    with pytest.raises(InvalidRequest, match="there is no gradient to apply"):
        office.run(session, "optim_step", 7)


def test_foreign_and_damaged_checkpoints_are_refused(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    office.run(session, "save", 1, checkpoint="good")
    key = "sessions/checkpoints/good.safetensors"
    data = office.store.get(key).data
    office.store.put(key, data[: len(data) // 2])
    with pytest.raises(AdapterRejected, match="checkpoint 'good' is damaged"):
        office.run(session, "load", 2, checkpoint="good")
    office.store.put(key, data.replace(b'base_digest\\": \\"test', b'base_digest\\": \\"TEST'))
    with pytest.raises(AdapterRejected, match="belongs to base model TEST"):
        office.run(session, "load", 3, checkpoint="good")
    with pytest.raises(AdapterRejected, match="belongs to base model TEST"):
        office.open(checkpoint="good")
    assert office.manager.counts == (1, 4)


def test_a_given_shape_must_agree_with_what_is_continued(office: Office) -> None:
    office.registry.publish("old", random_adapter(office.host, rank=4), base_digest="test")
    with pytest.raises(InvalidRequest, match=r"lora\.rank is 8, but the adapter"):
        office.open(adapter="old", lora={"rank": 8})
    session = office.open(adapter="old", lora={"rank": 4})
    assert office.manager.get(session)["lora"]["rank"] == 4


def test_the_base_models_name_cannot_be_published(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    with pytest.raises(TemperError, match="name of the base model"):
        office.send(session, "save", 1, name="tiny")


def test_a_bug_in_one_call_is_that_calls_alone(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    session = office.open(lora={"rank": 4})
    policy = office.manager._sessions[session].resident.present
    monkeypatch.setattr(policy, "begin", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        office.run(session, "forward", 1, data=DATA)
    monkeypatch.undo()
    assert office.run(session, "forward", 2, data=DATA)["loss"] > 0


def test_ratios_that_overflow_are_refused_although_the_loss_is_clipped(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    far = {"token_ids": [5, 6, 7], "advantages": [0, 1, 1], "logprobs": [0, -1e4, -1e4]}
    for seq, loss in enumerate(("ppo", "cispo"), 1):
        with pytest.raises(InvalidRequest, match="overflow"):
            office.run(session, "forward_backward", seq, loss=loss, data=[far])


def test_a_session_that_nobody_waits_for_is_given_up(office: Office) -> None:
    name, opened = office.manager.open(OpenSession(lora={"rank": 4}))  # type: ignore[arg-type]
    assert not opened.cancel(), "whoever waits cannot break it"
    office.manager.abandon(name)
    office.compute()
    with pytest.raises(Gone, match="given up"):
        opened.result(0)
    assert office.host.memory_budget.held() == {}
    assert office.manager.counts[0] == 0
    office.manager.abandon(name)


def test_a_watcher_that_fails_does_not_stop_the_trainer(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    view = office.send(session, "forward", 1, data=DATA)
    assert office.manager.watch(view.id, lambda: 1 // 0)
    office.compute()
    assert office.manager.look(view.id).state is CallState.DONE
    assert office.run(session, "forward", 2, data=DATA)["loss"] > 0


def test_what_ended_is_counted(host: TrainingHost) -> None:
    office = Office(host)
    session = office.open(lora={"rank": 4})
    office.run(session, "forward", 1, data=DATA)
    with pytest.raises(InvalidRequest):
        office.run(session, "optim_step", 2)
    metrics = office.manager._metrics
    assert metrics.session_calls.labels("forward", "done")._value.get() == 1
    assert metrics.session_calls.labels("optim_step", "failed")._value.get() == 1
    assert metrics.sessions._value.get() == 1
    office.manager.close(session)
    assert metrics.sessions._value.get() == 0


def test_a_long_call_lets_other_sessions_in_between_microbatches(office: Office) -> None:
    long = office.open(lora={"rank": 2}, max_tokens_per_microbatch=16)
    short = office.open(lora={"rank": 2})
    whole = office.send(long, "forward_backward", 1, loss="cross_entropy", data=[{"token_ids": [5] * 17}] * 20)
    quick = office.send(short, "forward", 1, data=DATA)
    for _ in range(6):
        office.manager.run_next()
    assert office.manager.look(quick.id).state is CallState.DONE
    assert office.manager.look(whole.id).running
    office.compute()
    assert office.manager.look(whole.id).state is CallState.DONE


def test_a_backward_that_fails_half_way_leaves_nothing(office: Office) -> None:
    session = office.open(lora={"rank": 2}, max_tokens_per_microbatch=4)
    good = {"token_ids": [5, 6, 7, 8, 9], "advantages": [0, 1, 1, 1, 1], "logprobs": [0, -1, -1, -1, -1]}
    far = {"token_ids": [5, 6, 7], "advantages": [0, 1, 1], "logprobs": [0, -1e4, -1e4]}
    with pytest.raises(InvalidRequest, match="overflow"):
        office.run(session, "forward_backward", 1, loss="importance_sampling", data=[good, good, far])
    parameters = office.manager._sessions[session].resident.present.lora.parameters()
    assert not any(parameter.grad.any() for parameter in parameters if parameter.grad is not None)
    with pytest.raises(InvalidRequest, match="forward_backward seq 1 failed"):
        office.run(session, "optim_step", 2)
