"""Episodes of a policy that says what it is told to, in worlds that do the same."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import TemperError
from services.common.jobs import GrpoJob
from services.common.jobs.fields.prompts import PromptFields
from services.common.jobs.kinds.environment import EnvironmentReward, FailureKind
from services.common.jobs.kinds.generate import RolloutPrompt
from services.common.text.tokenizer import TextCodec
from services.trainer.host.rollouts import Completion, RolloutRequest
from services.trainer.sampling.answers import ReadAnswer
from services.trainer.sampling.environments.episodes import Dropped, Episode, Player, Start
from services.trainer.sampling.environments.rounds import made_round
from services.trainer.sampling.environments.world import Outcome, user_message
from services.trainer.sampling.rounds.groups import Group, ScoredPrompt


class Says:
    """A stream in which the policy always says the same."""

    most, most_tokens = 4, 512

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)

    def submit(
        self, request: RolloutRequest, max_tokens: int, done: Callable[[Completion | TemperError], None]
    ) -> None:
        del request, max_tokens
        done(Completion(self._tokens, array("f", [-0.5] * len(self._tokens)), truncated=False))

    def cut(self) -> None:
        raise AssertionError("nobody cuts")

    def check(self) -> None:
        return


class Told:
    """Worlds, and the world of each, in which every answer has the same outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    @contextlib.asynccontextmanager
    async def open(self, tools: Sequence[Mapping[str, Any]]) -> AsyncIterator[Told]:
        del tools
        yield self

    async def begin(self, params: Mapping[str, Any]) -> str:
        del params
        return "Go."

    async def state(self) -> str:
        return "begun"

    async def act(self, answer: ReadAnswer) -> Outcome:
        del answer
        return self._outcome


def play(codec: TextCodec, outcome: Outcome, **fields: Any) -> Episode | Dropped:
    environment = EnvironmentReward.model_validate({"url": "http://a.example", "attempts": 1, **fields})
    generate = {"prompts": ["{observation}"], "rounds": 1, "max_tokens": 8, "reward": environment.model_dump()}
    job = GrpoJob.model_validate({"adapter": "a", "generate": generate})
    player = Player(codec, job, environment, Told(outcome), most_tokens=512, max_tokens=8)
    start = Start(PromptFields(prompt="{observation}"), (), {}, 1)
    (found,) = player.play([start], Says([*codec.encode("hi"), codec.eos_ids[0]]), lambda: None)
    assert found is not None
    return found


def test_an_episode_ends_with_its_turns(codec: TextCodec) -> None:
    found = play(codec, Outcome([user_message("more <|im_end|>")], 0.5), max_turns=3)
    assert isinstance(found, Episode)
    assert found.truncated
    assert (found.rewards, len(found.observations)) == ([0.5] * 3, 2)
    # What a world says ends no turn.
    assert [tokens.count(codec.eos_ids[0]) for tokens in found.observations] == [1, 1]


@pytest.mark.parametrize(("reward", "weight"), [(1e9, 2.0), (-2e6, 1e6), (2e9, 1.0)])
def test_rewards_that_are_too_large_with_their_weight_are_failures(
    codec: TextCodec, reward: float, weight: float
) -> None:
    """Also the sum of a turn's calls, each within the limit."""
    found = play(codec, Outcome((), reward, done=True), weight=weight)
    assert isinstance(found, Dropped)
    assert found.failures == (FailureKind.PROTOCOL,)
    assert "not a number between ±1e+09" in found.reason


@pytest.mark.parametrize(
    ("second", "unequal"), [({}, 0.0), ({"state": "other"}, 1.0), ({"state": ""}, 0.0), ({"prompt": (1,)}, 1.0)]
)
def test_groups_that_do_not_begin_alike_are_counted(
    codec: TextCodec, second: Mapping[str, Any], unequal: float
) -> None:
    """By what they were shown, and by the states of those environments that tell them."""
    one = play(codec, Outcome((), 1.0, done=True))
    assert isinstance(one, Episode)
    prompt = ScoredPrompt(one.prompt, RolloutPrompt(prompt="{observation}"))
    group = Group(0, 0, prompt, [one, replace(one, **second)])
    made = made_round(0, 0.0, 1.0, EnvironmentReward(url="http://a.example"), [group])
    assert made.metrics()["environment_unequal_starts"] == unequal
