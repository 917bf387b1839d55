"""Clients stream while versions are published and attached: nothing fails and no answer mixes versions."""

from __future__ import annotations

import asyncio
import collections
import itertools
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.adapters_for_tests import AdapterFiles, Reference
from tests.stack import Stack

NAME = "swap-under-load"
STREAMS = 16
TOKENS = 24
VERSIONS = 16
TIE = 1e-3
"""Two tokens whose logits differ by less than this may swap between batch shapes."""


@dataclass(frozen=True, slots=True)
class Answer:
    adapter: str | None
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


async def stream_once(
    client: httpx.AsyncClient, model: str, prompt: str, begun: dict[str | None, asyncio.Event]
) -> Answer:
    """One streamed greedy completion; every chunk must name the same version as the response header.

    Args:
        begun: the event of its version is set as soon as the answer begins.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    adapters: set[str | None] = set()
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
            prompt_ids = tuple(chunk.get("prompt_token_ids") or prompt_ids)
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
    assert done
    assert len(tokens) == TOKENS
    assert adapters == {header}
    return Answer(header, prompt_ids, tuple(tokens))


async def publish(client: httpx.AsyncClient, name: str, files: AdapterFiles) -> str:
    """Uploads one version and attaches it to the base model's name."""
    response = await client.post(
        "/v1/adapters",
        data={"name": name},
        files={
            "adapter_model.safetensors": ("adapter_model.safetensors", files.weights),
            "adapter_config.json": ("adapter_config.json", files.config),
        },
    )
    assert response.status_code in (200, 201), response.text
    attached = await client.post(f"/v1/adapters/{name}/attach", json={})
    assert attached.status_code == 200, attached.text
    version = response.json()["version"]
    return f"{name}@{version}"


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
