"""Sessions of one engine: opened, called, expired and closed; computed by whoever runs the trainer's part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from services.common.errors import (
    Conflict,
    DoesNotFit,
    Gone,
    InvalidRequest,
    NotFound,
    TemperError,
    Unavailable,
)
from services.common.jobs.training_sessions.calls import OpenSession
from services.trainer.training_sessions.call_queue import CallState
from tests.training_support import TrainingHost
from tests.unit.trainer.training_sessions.office import DATA, INSTANCE, Office, train


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


def test_all_tokens_are_scored_where_that_is_asked_for(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    data = {"token_ids": [5, 6, 7, 8], "weights": [0, 0, 1, 2]}
    plain = office.run(session, "forward_backward", 1, loss="cross_entropy", data=[data])
    norm = office.run(session, "optim_step", 2, learning_rate=0)["grad_norm"]
    whole = office.run(session, "forward_backward", 3, loss="cross_entropy", data=[data | {"score_all": True}])
    assert whole["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert whole["logprobs"][0][2:] == pytest.approx(plain["logprobs"][0][2:], rel=1e-6)
    assert (whole["logprobs"][0][0], whole["scored_tokens"]) == (None, 3)
    assert office.run(session, "optim_step", 4, learning_rate=0)["grad_norm"] == pytest.approx(norm, rel=1e-6)
    nothing = {"token_ids": [5, 6, 7], "weights": [0, 0, 0], "score_all": True}
    assert office.run(session, "forward", 5, data=[nothing])["loss"] == 0


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("dro", {}),
        ("dro", {"beta": 2.0}),
        ("cispo", {"floor": 0.9, "cap": 1.1}),
    ],
)
def test_losses_beyond_tinkers_first(office: Office, loss: str, config: dict[str, float]) -> None:
    session = office.open(lora={"rank": 4})
    logp = torch.tensor(office.run(session, "forward", 1, data=[{"token_ids": [5, 6, 7, 8]}])["logprobs"][0][1:])
    behaviour, advantages = logp + torch.tensor([-0.7, 0.0, 0.05]), torch.tensor([1.0, -2.0, 0.5])
    datum = {
        "token_ids": [5, 6, 7, 8],
        "logprobs": [0.0, *behaviour.clamp(max=0).tolist()],
        "advantages": [0.0, *advantages.tolist()],
    }
    gap = logp - behaviour.clamp(max=0)
    if loss == "dro":
        expected = -(logp * advantages - 0.5 * config.get("beta", 0.1) * gap**2).sum()
    else:
        expected = -(gap.exp().clamp(0.9, 1.1) * logp * advantages).sum()
    result = office.run(session, "forward_backward", 2, loss=loss, loss_config=config, data=[datum])
    assert result["loss"] == pytest.approx(float(expected), rel=1e-4)


def test_a_refused_call_keeps_its_place_in_the_line(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    step = office.send(session, "optim_step", 3)
    office.run(session, "forward_backward", 1, loss="cross_entropy", data=DATA)
    with pytest.raises(InvalidRequest, match="no such loss"):
        office.run(session, "refused", 2, reason="no such loss", gradient=True)
    office.compute()
    assert "forward_backward seq 2 was refused" in str(office.manager.look(step.id).error)
    with pytest.raises(InvalidRequest, match="too dear"):
        office.run(session, "refused", 4, reason="too dear")
    assert train(office, session, 5) > 0


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


def test_a_kernel_that_does_not_fit_is_told_to_its_call(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    session = office.open(lora={"rank": 4})
    policy = office.manager._sessions[session].resident.present

    def begin(*_: object, **__: object) -> None:
        raise errors.OutOfResources(180_000, 101_376, "shared memory")

    monkeypatch.setattr(policy, "begin", begin)
    with pytest.raises(DoesNotFit, match="asks for 180,000 of shared memory"):
        office.run(session, "forward", 1, data=DATA)


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
