"""Clients that ask for completions and say what they think of some: keep-alive connections, one exchange at a time."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cli.http.load.streams import post

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What is sent."""

    body: Mapping[str, Any]
    """Of every completion."""
    slots: int
    """Connections at a time."""
    rounds: int
    """Completions one after the other on each of them."""
    feedback: float = 0.0
    """Share of the completions that get feedback, on the same connection."""
    pause_seconds: float = 0.0
    """Longest pause before a completion, drawn at random."""


@dataclass(slots=True)
class Told:
    """What clients saw."""

    first_bytes: list[float] = field(default_factory=list)
    """Seconds from a completion's request to the first byte of its answer, and of feedback below."""
    feedback: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Beginnings of answers that have another status than 200 and 201."""
    seconds: float = 0.0


def exchange(port: int, load: Exchanges, seed: int) -> Told:
    """Runs all exchanges in this process."""
    import uvloop

    return uvloop.run(_all(port, load, seed))


async def _all(port: int, load: Exchanges, seed: int) -> Told:
    told, rng = Told(), random.Random(seed)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.slots):
            group.create_task(_slot(port, load, random.Random(rng.random()), told))
    told.seconds = time.monotonic() - began
    return told


async def _slot(port: int, load: Exchanges, rng: random.Random, told: Told) -> None:
    reader, writer = await asyncio.open_connection(_HOST, port)
    request = post(_HOST, "/v1/completions", load.body)
    for _ in range(load.rounds):
        await asyncio.sleep(rng.uniform(0.0, load.pause_seconds))
        answer = await _answer(reader, writer, request, told.first_bytes, told)
        if rng.random() < load.feedback:
            said = {"completion_id": _id(answer), "thumb": "up", "user": f"u-{rng.randrange(1000)}"}
            await _answer(reader, writer, post(_HOST, "/v1/feedback", said), told.feedback, told)
    writer.close()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, first_bytes: list[float], told: Told
) -> bytes:
    """The first of an answer's body, once all of it is read."""
    sent = time.monotonic()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if (length := head.lower().partition(b"content-length:")[2]) or b"chunked" not in head.lower():
        first = await reader.readexactly(int(length.split(b"\r\n", 1)[0]))
        first_bytes.append(time.monotonic() - sent)
    else:
        first = await reader.readuntil(b"\n\n")
        first_bytes.append(time.monotonic() - sent)
        await reader.readuntil(b"data: [DONE]\n\n")
        await reader.readuntil(b"0\r\n\r\n")
    if head[9:12] not in (b"200", b"201"):
        told.failed.append((head[9:12] + b" " + first[:200]).decode("utf-8", "replace"))
    return first


def _id(answer: bytes) -> str:
    """Id of a completion, of which this is the first event or all."""
    return str(json.loads(b'"' + answer.partition(b'"id":"')[2].partition(b'"')[0] + b'"'))
