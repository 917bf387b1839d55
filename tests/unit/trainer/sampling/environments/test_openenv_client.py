"""The client of environments against servers that behave, and one that does not."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from benchmarks.training.environments.serving import Fault, FaultyServer, misbehaving, serving
from services.common.errors import InvalidRequest
from services.common.jobs.kinds.environment import EnvironmentReward, FailureKind
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.sample import ToolCall
from services.environments.calculator import Calculator
from services.environments.guess import Guess
from services.trainer.sampling.answers import ReadAnswer
from services.trainer.sampling.environments.openenv import OpenEnvWorlds, socket_url
from services.trainer.sampling.environments.world import EnvironmentFailed, Outcome, World

T = TypeVar("T")
KINDS = {
    Fault.SILENT: FailureKind.TIMEOUT,
    Fault.BROKEN: FailureKind.CONNECTION,
    Fault.CLOSED: FailureKind.CONNECTION,
    Fault.OVERSIZED: FailureKind.OVERSIZED,
    Fault.CRASHED: FailureKind.ERROR,
    Fault.FULL: FailureKind.CAPACITY,
}
"""Kinds of failures; of faults that are not here: protocol."""


def said(text: str = "", *calls: ToolCall, broken: bool = False) -> ReadAnswer:
    return ReadAnswer(text, text, calls, broken, stopped=False)


def play(
    url: str, work: Callable[[World], Awaitable[T]], tools: Any = (), webhooks: Webhooks | None = None, **fields: Any
) -> T:
    spec = EnvironmentReward.model_validate({"url": url, "timeout_seconds": 20.0, **fields})
    worlds = OpenEnvWorlds(spec, webhooks or Webhooks(allowed=(url,)), "generate.reward[0]")

    async def run() -> T:
        async with worlds.open(tools) as world:
            return await work(world)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with serving(Guess) as url:
        yield url


def test_a_text_game(guess: str) -> None:
    async def halves(world: World) -> tuple[str, list[Outcome]]:
        shown = await world.begin({"seed": 3, "guesses": 3})
        return shown, [await world.act(said("none")), await world.act(said("3")), await world.act(said("4"))]

    shown, (unsaid, first, second) = play(guess, halves)
    assert shown == "What number is it, from 2 to 4?"
    assert unsaid == Outcome([{"role": "user", "content": "Say a number from 2 to 4."}], 0.0)
    assert first == Outcome([{"role": "user", "content": "It is higher, from 4 to 4."}], 0.0)
    assert second == Outcome((), 1.0, done=True)


def test_equal_seeds_begin_alike_each_in_an_environment_of_its_own(guess: str) -> None:
    spec = EnvironmentReward(url=guess)
    worlds = OpenEnvWorlds(spec, Webhooks(allowed=(guess,)), "r")

    async def two() -> list[Outcome]:
        async with worlds.open(()) as one, worlds.open(()) as other:
            await one.begin({"seed": 3})
            await other.begin({"seed": 3})
            return [await world.act(said(guess)) for world in (one, other) for guess in ("3", "4")]

    assert [outcome.reward for outcome in asyncio.run(two())] == [0.0, 1.0, 0.0, 1.0]


def test_equal_states_are_told_from_others(guess: str) -> None:
    async def states(world: World) -> list[str]:
        found = []
        for name in ("a", "b"):
            await world.begin({"seed": 3, "episode_id": name})
            found.append(await world.state())
        await world.act(said("2"))
        return [*found, await world.state()]

    first, second, later = play(guess, states)
    assert first == second != later


@pytest.mark.parametrize("code", ["UNKNOWN_TYPE", "EXECUTION_ERROR"])
def test_an_environment_without_a_state_can_be_acted_in(code: str) -> None:
    told = {"observation": {"text": "Go on."}, "reward": 1.0, "done": True}

    async def server(connection: ServerConnection) -> None:
        async for message in connection:
            kind, data = "observation", told | {"done": json.loads(message)["type"] == "step"}
            if json.loads(message)["type"] == "state":
                kind, data = "error", {"code": code, "message": "no"}
            await connection.send(json.dumps({"type": kind, "data": data}))

    async def run() -> tuple[str, Outcome]:
        async with serve(server, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{next(iter(listening.sockets)).getsockname()[1]}"
            async with OpenEnvWorlds(EnvironmentReward(url=url), Webhooks(allowed=(url,)), "r").open(()) as world:
                await world.begin({})
                return await world.state(), await world.act(said("1"))

    assert asyncio.run(run()) == ("", Outcome((), 1.0, done=True))


def test_calls_are_checked_made_and_answered() -> None:
    call = ToolCall("get_sum", {"number": 7})

    async def work(world: World) -> list[Outcome]:
        await world.begin({"seed": 5})
        wrong = [
            said("", ToolCall("get_product", {"number": 1})),
            said("", ToolCall("get_sum", {"number": "7"})),
            said("", ToolCall("get_sum", "7")),
            said("", ToolCall("get_sum", {"number": 7, "by": math.inf})),
            said("", ToolCall("get_sum", {"number": 7, "\ud800": "\ud800"})),
            said("", call, broken=True),
        ]
        return [*[await world.act(one) for one in wrong], await world.act(said("", call, call))]

    with serving(Calculator) as url:
        *wrong, right = play(url, work, Calculator.tools)
    texts = [outcome.messages[0]["content"] for outcome in wrong]
    assert texts == [
        "error: there is no tool 'get_product'",
        *["error: the arguments are not those of get_sum"] * 4,
        "error: the call is not complete",
    ]
    # None of the wrong ones has changed the memory, and both of the others have.
    first, second = (json.loads(message["content"])["result"] for message in right.messages)
    assert second - first == 7
    assert all(message["role"] == "tool" for message in right.messages)


def test_what_the_environment_cannot_take_is_told(guess: str) -> None:
    async def work(world: World) -> Outcome:
        await world.begin({})
        return await world.act(said("4"))

    outcome = play(guess, work, message_field="guess")
    assert outcome.messages[0]["content"] == 'error: an action is {"message": TEXT}'


def test_an_answer_without_a_field_for_it_ends_the_episode(guess: str) -> None:
    async def work(world: World) -> Outcome:
        await world.begin({})
        return await world.act(said("4"))

    assert play(guess, work, message_field=None) == Outcome(done=True)


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_is_a_failure_of_its_kind(fault: Fault) -> None:
    async def work(world: World) -> None:
        await world.begin({"seed": 1})

    server = FaultyServer(Guess, share=1.0, seed=0, faults=(fault,))
    with misbehaving(server) as url, pytest.raises(EnvironmentFailed) as failed:
        play(url, work, timeout_seconds=0.2 if fault is Fault.SILENT else 20.0)
    assert failed.value.kind is KINDS.get(fault, FailureKind.PROTOCOL)
    assert server.made[fault] == 1


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next() -> None:
    """The reward of a step would be learnt as that of another."""
    answer = {"observation": {"text": "Go on."}, "reward": 0.0, "done": False}

    async def twice(connection: ServerConnection) -> None:
        async for message in connection:
            for reward in (0.0, 1.0) if json.loads(message)["type"] == "step" else (0.0,):
                await connection.send(json.dumps({"type": "observation", "data": answer | {"reward": reward}}))

    async def run() -> None:
        async with serve(twice, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            async with OpenEnvWorlds(EnvironmentReward(url=url), Webhooks(allowed=(url,)), "r").open(()) as world:
                await world.begin({})
                assert (await world.act(said("1"))).reward == 0.0
                await world.act(said("2"))

    with pytest.raises(EnvironmentFailed, match="answered before it was asked for step") as failed:
        asyncio.run(run())
    assert failed.value.kind is FailureKind.PROTOCOL


def test_nobody_listens() -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        play("http://127.0.0.1:1", lambda world: world.begin({}))
    assert failed.value.kind is FailureKind.CONNECTION


def test_a_server_without_room_says_so() -> None:
    with serving(Guess, most_sessions=1) as url:
        spec = EnvironmentReward(url=url)
        worlds = OpenEnvWorlds(spec, Webhooks(allowed=(url,)), "r")

        async def two() -> None:
            async with worlds.open(()) as one, worlds.open(()) as other:
                await one.begin({})
                await other.begin({})

        with pytest.raises(EnvironmentFailed) as failed:
            asyncio.run(two())
    assert failed.value.kind is FailureKind.CAPACITY


def test_redirects_are_not_followed_and_keys_are_sent() -> None:
    keys = []

    async def elsewhere(connection: ServerConnection, request: Request) -> Response:
        keys.append(request.headers.get("Authorization"))
        response = connection.respond(302, "elsewhere")
        response.headers["Location"] = "ws://127.0.0.1:1/ws"
        return response

    async def nobody(connection: ServerConnection) -> None:
        del connection

    async def run() -> None:
        async with serve(nobody, "127.0.0.1", 0, process_request=elsewhere) as server:
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            webhooks = Webhooks(allowed=(url,), keys={url: "a-key"})
            async with OpenEnvWorlds(EnvironmentReward(url=url), webhooks, "r").open(()):
                raise AssertionError("connected")

    with pytest.raises(EnvironmentFailed, match="302") as failed:
        asyncio.run(run())
    assert failed.value.kind is FailureKind.CONNECTION
    assert keys == ["Bearer a-key"]


def test_addresses_must_be_listed(guess: str) -> None:
    with pytest.raises(InvalidRequest, match=r"generate.reward\[0\].url: .*TEMPER_REWARD_WEBHOOKS"):
        OpenEnvWorlds(EnvironmentReward(url=guess), Webhooks(allowed=("http://127.0.0.1:1",)), "generate.reward[0]")


@pytest.mark.parametrize(
    ("url", "socket"),
    [
        ("http://a.example:8000", "ws://a.example:8000/ws"),
        ("https://a.example/envs/one/", "wss://a.example/envs/one/ws"),
        ("https://a.example/envs?level=2", "wss://a.example/envs/ws?level=2"),
        ("http://a.example?level=2", "ws://a.example/ws?level=2"),
    ],
)
def test_addresses_of_sockets(url: str, socket: str) -> None:
    assert socket_url(url) == socket
