"""Clients stream while versions are published and attached: nothing fails and no answer mixes versions."""

from __future__ import annotations

import asyncio
import collections
import itertools
from dataclasses import dataclass

import httpx
import pytest
import redis

from services.common.jobs import GrpoJob
from services.common.queue.keyspace import TRAINING
from services.common.queue.records import SPEC
from tests.e2e.adapters_for_tests import AdapterFiles, Reference
from tests.e2e.jobs import wait_for_end
from tests.stack import PATIENCE, Stack

NAME = "swap-under-load"
STREAMS = 16
TOKENS = 24
LONG = 400
"""Tokens of a stream that a swap falls into."""
VERSIONS = 16
TIE = 1e-3
"""Two tokens whose logits differ by less than this may swap between batch shapes."""


@dataclass(frozen=True, slots=True)
class Answer:
    completion_id: str
    adapter: str | None
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


async def stream_once(
    client: httpx.AsyncClient,
    model: str,
    prompt: str,
    begun: dict[str | None, asyncio.Event],
    count: int = TOKENS,
) -> Answer:
    """One streamed greedy completion; every chunk must name the same version as the response header.

    Args:
        begun: the event of its version is set as soon as the answer begins.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": count,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    adapters: set[str | None] = set()
    completion_id = ""
    prompt_ids: tuple[int, ...] = ()
    tokens: list[int] = []
    done = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")
        header = response.headers.get("x-temper-adapter") or None
        begun[header].set()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            chunk = httpx.Response(200, content=line[6:]).json()
            assert "error" not in chunk, chunk
            adapters.add(chunk["adapter"])
            completion_id = chunk["id"]
            prompt_ids = tuple(chunk.get("prompt_token_ids") or prompt_ids)
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
    assert done
    assert len(tokens) == count
    assert adapters == {header}
    return Answer(completion_id, header, prompt_ids, tuple(tokens))


async def publish(client: httpx.AsyncClient, name: str, files: AdapterFiles) -> str:
    """Uploads one version and attaches it to the base model's name."""
    version = await upload(client, name, files)
    await attach(client, name)
    return version


async def attach(client: httpx.AsyncClient, name: str) -> None:
    """Attaches the current version of an adapter to the base model's name."""
    attached = await client.post(f"/v1/adapters/{name}/attach", json={})
    assert attached.status_code == 200, attached.text


async def upload(client: httpx.AsyncClient, name: str, files: AdapterFiles) -> str:
    """Uploads one version; returns "name@n"."""
    response = await client.post(
        "/v1/adapters",
        data={"name": name},
        files={
            "adapter_model.safetensors": ("adapter_model.safetensors", files.weights),
            "adapter_config.json": ("adapter_config.json", files.config),
        },
    )
    assert response.status_code in (200, 201), response.text
    return f"{name}@{response.json()['version']}"


@pytest.mark.usefixtures("unattached")
async def test_versions_are_swapped_under_streams(stack: Stack) -> None:
    reference = Reference(stack.model)
    prompts = [
        "What is 12 plus 7?",
        "Reverse the word temper.",
        "Hello there",
        "Extract the name: Ada is 36 years old.",
    ]
    answers: list[Answer] = []
    begun: dict[str | None, asyncio.Event] = collections.defaultdict(asyncio.Event)
    stop = asyncio.Event()
    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with httpx.AsyncClient(base_url=stack.url, timeout=60, limits=limits) as client:

        async def keep_streaming(prompt: str) -> None:
            while not stop.is_set():
                answers.append(await stream_once(client, stack.served_model_name, prompt, begun))

        async def keep_publishing() -> list[str]:
            versions = []
            for seed in range(VERSIONS):
                files = await asyncio.to_thread(reference.randomize, seed, scale=0.12)
                versions.append(await publish(client, NAME, files))
                # Every version answers, however fast the next one would come.
                await asyncio.wait_for(begun[versions[-1]].wait(), 60)
            stop.set()
            return versions

        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(keep_publishing())
            for prompt in itertools.islice(itertools.cycle(prompts), STREAMS):
                group.create_task(keep_streaming(prompt))
        versions = publishing.result()
        after = await stream_once(client, stack.served_model_name, prompts[0], begun)

    assert versions == [f"{NAME}@{n}" for n in range(1, VERSIONS + 1)]
    assert after.adapter == versions[-1]
    seen = {answer.adapter for answer in answers}
    assert seen - {None} == set(versions)
    assert len({answer.tokens for answer in answers}) >= VERSIONS // 2, (
        "the versions do not differ: the test says nothing"
    )
    wrong = []
    for version, same_version in itertools.groupby(
        sorted({*answers, after} - {a for a in answers if a.adapter is None}, key=lambda a: str(a.adapter)),
        key=lambda a: str(a.adapter),
    ):
        reference.randomize(int(version.rpartition("@")[2]) - 1, scale=0.12)
        wrong += [a for a in same_version if reference.greedy_gap(a.prompt, a.tokens) > TIE]
    assert not wrong, f"{len(wrong)} answers are not greedy under the version they name: {wrong[:3]}"


@pytest.mark.thorough
@pytest.mark.usefixtures("unattached")
async def test_a_trajectory_across_a_swap_says_whose_each_token_is(stack: Stack) -> None:
    """A stream keeps its version, what goes on from it has the new one, and the trajectory of both names both."""
    reference = Reference(stack.model)
    name = "swap-in-a-turn"
    begun: dict[str | None, asyncio.Event] = collections.defaultdict(asyncio.Event)
    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE) as client:
        old = await publish(client, name, await asyncio.to_thread(reference.randomize, 1, scale=0.12))
        new = await upload(client, name, await asyncio.to_thread(reference.randomize, 2, scale=0.12))
        streaming = asyncio.create_task(stream_once(client, stack.served_model_name, "Hello there", begun, LONG))
        await asyncio.wait_for(begun[old].wait(), PATIENCE)
        await attach(client, name)
        assert not streaming.done(), "it ended before the swap: the test says nothing"
        first = await streaming
        asked = {"model": stack.served_model_name, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        asked |= {"prompt": [*first.prompt, *first.tokens], "max_tokens": TOKENS}
        answer = (await client.post("/v1/completions", json=asked)).raise_for_status().json()
        trajectories = [
            {"completion_ids": [first.completion_id, answer["id"]], "reward": 1},
            {"completion_ids": [first.completion_id], "reward": 0},
        ]
        job = {"adapter": f"{name}-job", "groups": [{"trajectories": trajectories}], "lora": {"rank": 2}}
        made = await client.post("/v1/train/grpo", json={**job, "attach": False})
        assert made.status_code == 202, made.text
    with redis.Redis.from_url(stack.settings.redis_url.get_secret_value(), decode_responses=True) as kept:
        spec = SPEC.validate_json(str(kept.hget(TRAINING.job_key(made.json()["id"]), "spec")))
    assert isinstance(spec, GrpoJob)
    whole, part = [member.segments for member in (spec.groups or [])[0].played]
    later = tuple(answer["choices"][0]["token_ids"])
    assert [segment.type for segment in whole] == ["observation", "action"], "behind it nothing was seen: one turn"
    action = whole[1].model_dump(include={"token_ids", "adapter", "versions"})
    spans = [{"adapter": old, "tokens": LONG}, {"adapter": new, "tokens": TOKENS}]
    assert action == {"token_ids": [*first.tokens, *later], "adapter": None, "versions": spans}
    assert part[1].model_dump(include={"adapter", "versions"}) == {"adapter": old}
    # And they are what they are said to be.
    assert reference.greedy_gap(asked["prompt"], later) <= TIE
    await asyncio.to_thread(reference.randomize, 1, scale=0.12)
    assert reference.greedy_gap(first.prompt, first.tokens) <= TIE
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as client:
        assert wait_for_end(client, made.json()["id"])["state"] == "succeeded"
