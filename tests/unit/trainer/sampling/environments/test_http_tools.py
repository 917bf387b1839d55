"""Tools over HTTP against a real server that answers well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.jobs.kinds.environment import EnvironmentReward, FailureKind
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.sample import ToolCall
from services.common.jobs.scorers.webhook_client import SIGNATURE_HEADER, TIMESTAMP_HEADER, sign
from services.trainer.sampling.answers import parsed_arguments
from services.trainer.sampling.environments.http_tools import ToolWorlds
from services.trainer.sampling.environments.world import EnvironmentFailed, Outcome
from tests.unit.common.jobs.scorers.test_webhook import SECRET, Reply, Seen, Server, serving
from tests.unit.trainer.sampling.environments.test_openenv_client import said

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def ask(server: Server, *calls: ToolCall, **changes: Any) -> Outcome:
    tool = {"name": "get_weather", "parameters": SCHEMA, "url": f"{server.url}/weather"}
    spec = EnvironmentReward.model_validate({"tools": [tool], "timeout_seconds": 20.0, **changes})
    worlds = ToolWorlds(spec, Webhooks(allowed=(server.url,), secret=SECRET, attempts=2), "generate.reward[0]")

    async def run() -> Outcome:
        async with worlds.open(spec.definitions or ()) as world:
            assert await world.begin({}) == ""
            return await world.act(said("It is warm.", *calls))

    return asyncio.run(run())


def answering(*replies: Reply | None) -> Callable[[Seen], Reply | None]:
    left = list(replies)
    return lambda _: left.pop(0)


CALL = ToolCall("get_weather", {"city": "Oslo"})


def test_arguments_are_posted_signed_and_the_answer_is_read() -> None:
    with serving(lambda _: (200, {}, b'{"weather": "sunny"}')) as server:
        outcome = ask(server, CALL, CALL)
        first, second = server.seen
    assert outcome == Outcome([{"role": "tool", "content": '{"weather": "sunny"}'}] * 2)
    body = json.loads(first.body)
    assert (body["name"], body["arguments"]) == ("get_weather", {"city": "Oslo"})
    headers = {name.lower(): value for name, value in first.headers.items()}
    signature = sign(SECRET, headers[TIMESTAMP_HEADER.lower()], first.body)
    assert headers[SIGNATURE_HEADER.lower()] == signature
    assert body["episode"] == json.loads(second.body)["episode"]
    assert headers["idempotency-key"] != {n.lower(): v for n, v in second.headers.items()}["idempotency-key"]


def test_an_answer_without_calls_is_the_last() -> None:
    with serving(lambda _: None) as server:
        assert ask(server) == Outcome(done=True)
        assert server.seen == []


def test_wrong_arguments_are_not_sent() -> None:
    with serving(lambda _: None) as server:
        outcome = ask(server, ToolCall("get_weather", {"town": "Oslo"}), ToolCall("get_time", {"city": "Oslo"}))
        assert server.seen == []
    assert [message["content"] for message in outcome.messages] == [
        "error: the arguments are not those of get_weather",
        "error: there is no tool 'get_time'",
    ]


def test_arguments_that_are_nested_too_deep_are_not_sent() -> None:
    """No reader of JSON here takes them: they are the text that the model wrote, and it reads what is wrong."""
    text = '{"city": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert parsed_arguments(text) == text
    assert parsed_arguments('{"city": []}') == {"city": []}
    with serving(lambda _: None) as server:
        outcome = ask(server, ToolCall("get_weather", parsed_arguments(text)))
        assert server.seen == []
    assert [message["content"] for message in outcome.messages] == ["error: the arguments are not those of get_weather"]


def test_a_tool_that_refuses_is_read() -> None:
    with serving(lambda _: (404, {}, b"no such city")) as server:
        assert ask(server, CALL).messages[0]["content"] == "error: no such city"


@pytest.mark.parametrize("first", [None, (503, {}, b""), (429, {}, b"")])
def test_what_may_pass_is_asked_again_with_the_same_key(first: Reply | None) -> None:
    with serving(answering(first, (200, {}, b"fine"))) as server:
        assert ask(server, CALL).messages[0]["content"] == "fine"
        keys = [{n.lower(): v for n, v in one.headers.items()}["idempotency-key"] for one in server.seen]
    assert len(keys) == 2
    assert keys[0] == keys[1]


@pytest.mark.parametrize(("asked", "least"), [("1", 1.0), ("soon", 0.5), ("86400", 1.0)])
def test_a_tool_says_when_to_ask_again(asked: str, least: float) -> None:
    """As long as a call may take is waited for at most."""
    replies = answering((429, {"retry-after": asked}, b""), (200, {}, b"fine"))
    times: list[float] = []

    def answer(seen: Seen) -> Reply | None:
        times.append(time.monotonic())
        return replies(seen)

    with serving(answer) as server:
        given = {"timeout_seconds": 1.0} if asked == "86400" else {}
        assert ask(server, CALL, **given).messages[0]["content"] == "fine"
    assert times[1] - times[0] >= least


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (None, FailureKind.CONNECTION),
        ((500, {}, b"Traceback"), FailureKind.ERROR),
        ((302, {"location": "http://127.0.0.1:1"}, b""), FailureKind.ERROR),
        ((200, {}, b"\xff\xfe"), FailureKind.PROTOCOL),
        ((200, {}, b"x" * (2**20 + 1)), FailureKind.OVERSIZED),
    ],
)
def test_failures(reply: Reply | None, kind: FailureKind) -> None:
    with serving(lambda _: reply) as server, pytest.raises(EnvironmentFailed) as failed:
        ask(server, CALL)
    assert failed.value.kind is kind


def test_addresses_must_be_listed_and_requests_signed() -> None:
    spec = EnvironmentReward.model_validate({"tools": [{"name": "a", "url": "http://a.example/t"}]})
    with pytest.raises(InvalidRequest, match=r"reward\[1\].tools\[0\].url.*TEMPER_REWARD_WEBHOOKS"):
        ToolWorlds(spec, Webhooks(secret=SECRET), "reward[1]")
    with pytest.raises(InvalidRequest, match="TEMPER_REWARD_WEBHOOK_SECRET"):
        ToolWorlds(spec, Webhooks(allowed=("http://a.example",)), "reward[1]")
