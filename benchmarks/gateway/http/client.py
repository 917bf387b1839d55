"""Streamed completions over bare sockets from several processes: each handles a share of the connections, and all
requests start together."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cli.http.load.streams import Answer, Connection, post


@dataclass(frozen=True, slots=True)
class Load:
    """Load that one run sends."""

    host: str
    port: int
    model: str
    prompt_tokens: int
    new_tokens: int
    vocab_size: int
    usage: bool = False
    """Ask for the counts at the end."""


def request_bytes(load: Load, rng: random.Random) -> bytes:
    """POST /v1/completions with random tokens, streamed."""
    body = {
        "model": load.model,
        "prompt": [rng.randrange(load.vocab_size) for _ in range(load.prompt_tokens)],
        "max_tokens": load.new_tokens,
        "temperature": 1,
        "ignore_eos": True,
        "stream": True,
        # A random model samples tokens that are no text; with their ids every token is an event.
        "return_token_ids": True,
        "stream_options": {"include_usage": load.usage},
    }
    return post(load.host, "/v1/completions", body)


async def _share(load: Load, count: int, seed: int, go: Any) -> list[Answer]:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    requests = [request_bytes(load, rng) for _ in range(count)]
    futures = [loop.create_future() for _ in range(count)]
    connections: list[Connection] = []
    for future in futures:
        _, protocol = await loop.create_connection(partial(Connection, future), load.host, load.port)
        connections.append(protocol)
    await asyncio.to_thread(go.wait)
    for connection, request in zip(connections, requests, strict=True):
        connection.send(request)
    await asyncio.gather(*futures)
    for connection in connections:
        connection.close()
    return [connection.answer for connection in connections]


def _worker(load: Load, count: int, seed: int, go: Any, results: Any) -> None:
    import uvloop

    try:
        results.put(uvloop.run(_share(load, count, seed, go)))
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")


def run_load(load: Load, requests: int, *, processes: int, seed: int = 0) -> list[Answer]:
    """Sends all requests at once and waits for the answers.

    Raises:
        RuntimeError: one of them failed.
    """
    context = multiprocessing.get_context("spawn")
    processes = min(processes, requests)
    shares = [requests // processes + (index < requests % processes) for index in range(processes)]
    go, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_worker, args=(load, share, seed * 1000 + index, go, results), daemon=True)
        for index, share in enumerate(shares)
    ]
    for worker in workers:
        worker.start()
    answers: list[Answer] = []
    try:
        for _ in workers:
            part: Sequence[Answer] | str = results.get(timeout=600)
            if isinstance(part, str):
                raise RuntimeError(part)
            answers += part
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    failed = [answer.status for answer in answers if answer.status]
    if failed:
        raise RuntimeError(f"{len(failed)} of {requests} requests failed, the first with: {failed[0]}")
    return answers
