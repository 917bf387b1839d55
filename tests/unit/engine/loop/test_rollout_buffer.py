"""The memory of finished completions: bounds in number, bytes and age."""

from __future__ import annotations

from array import array

import pytest

from services.engine.loop.rollout_buffer import Rollout, RolloutBuffer
from services.engine.requests.adapter import AdapterPin
from services.engine.requests.outputs import Finished
from services.engine.requests.request import FinishReason, Request
from services.engine.requests.sampling_params import SamplingParams


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rollout(name: str, tokens: int = 3) -> Rollout:
    request = Request(name, (1, 2), SamplingParams(temperature=0.7), AdapterPin("a@2", "digest", 1))
    output = list(range(tokens))
    logprobs = array("f", [-0.5] * tokens)
    return Rollout.of(Finished(request, output, logprobs, FinishReason.LENGTH, 0, 0, 0.0, 0.0))


def test_holds_what_reinforcement_learning_needs() -> None:
    memory = RolloutBuffer(10, 60.0)
    memory.remember(rollout("a"))
    (found,), missing = memory.get(["a", "b"])
    assert missing == ["b"]
    assert (found.adapter, found.temperature, found.finish_reason) == ("a@2", 0.7, FinishReason.LENGTH)
    assert (list(found.prompt_token_ids), list(found.token_ids)) == ([1, 2], [0, 1, 2])
    assert found.token_ids.itemsize == found.sampling_logprobs.itemsize == 4
    with pytest.raises(ValueError, match="2 tokens but 1"):
        Rollout("x", array("I"), array("I", [1, 2]), array("f", [0.0]), 1.0, "", FinishReason.STOP)


def test_the_oldest_go_when_there_are_too_many() -> None:
    memory = RolloutBuffer(2, 60.0)
    for name in ("a", "b", "c"):
        memory.remember(rollout(name))
    memory.remember(rollout("b", 5))
    found, missing = memory.get(["a", "b", "c"])
    assert missing == ["a"]
    assert [len(kept.token_ids) for kept in found] == [5, 3]
    assert memory.nbytes == sum(kept.nbytes for kept in found)
    assert len(memory) == 2


def test_the_oldest_go_when_they_are_too_large() -> None:
    memory = RolloutBuffer(100, 60.0, max_bytes=3 * rollout("x").nbytes)
    for n in range(5):
        memory.remember(rollout(f"r{n}"))
    assert memory.get([f"r{n}" for n in range(5)])[1] == ["r0", "r1"]
    memory.remember(rollout("too large", 1000))
    assert len(memory) == 0
    assert memory.nbytes == 0


def test_rollouts_expire() -> None:
    clock = Clock()
    memory = RolloutBuffer(10, 60.0, clock=clock)
    memory.remember(rollout("a"))
    clock.now = 30.0
    memory.remember(rollout("b"))
    clock.now = 60.0
    assert memory.get(["a", "b"])[1] == ["a"]
    clock.now = 90.0
    assert len(memory) == 0


def test_a_stop_string_found_late_cuts_the_rollout() -> None:
    clock = Clock()
    memory = RolloutBuffer(10, 60.0, clock=clock)
    memory.remember(rollout("a", 5))
    clock.now = 30.0
    memory.cut("a", 7)
    memory.cut("unknown", 1)
    assert memory.get(["a"])[0][0].finish_reason is FinishReason.LENGTH
    memory.cut("a", 2)
    (found,), _ = memory.get(["a"])
    assert (list(found.token_ids), len(found.sampling_logprobs)) == ([0, 1], 2)
    assert found.finish_reason is FinishReason.STOP
    assert memory.nbytes == found.nbytes
    clock.now = 60.0
    assert len(memory) == 0


def test_none_are_remembered_when_off() -> None:
    memory = RolloutBuffer(0, 60.0)
    memory.remember(rollout("a"))
    assert len(memory) == 0
    with pytest.raises(ValueError, match="ttl_seconds"):
        RolloutBuffer(1, 0.0)
