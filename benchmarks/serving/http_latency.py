"""Time to first token and between tokens over HTTP, against a running gateway."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cli.local.ports import free_ports


@contextmanager
def started(model: Path, *options: str, quiet: bool = True) -> Iterator[dict[str, Any]]:
    """A `temper up` of its own, with its options; yields the line that it prints when it is ready: url, pids.

    Args:
        quiet: its log is not shown.

    Raises:
        RuntimeError: it did not get ready.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "cli", "up", "--json", "--model", str(model), "--data-dir", f"{scratch}/data"]
        process = subprocess.Popen(
            [*command, "--port", str(free_ports(1)[0]), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise RuntimeError("temper up did not get ready; run it by hand to see why")
            yield json.loads(line)
        finally:
            process.terminate()
            process.wait(90)
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def running_stack(model: Path) -> Iterator[tuple[str, float]]:
    """A `temper up` of its own; yields the URL and the seconds it took to get ready."""
    began = time.perf_counter()
    with started(model) as ready:
        yield ready["url"], time.perf_counter() - began


async def _one(client: httpx.AsyncClient, model: str, text: str, max_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and between tokens after it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    began = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            new = sum(len(choice["token_ids"]) for choice in json.loads(line[6:])["choices"])
            if new:
                last = time.perf_counter()
                first = first or last
                tokens += new
    if tokens != max_tokens:
        raise RuntimeError(f"{tokens} tokens instead of {max_tokens}")
    return first - began, (last - first) / max(1, tokens - 1)


async def _measure(url: str, streams: int, requests: int, max_tokens: int) -> dict[str, float]:
    limit = asyncio.Semaphore(streams)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def limited(index: int) -> tuple[float, float]:
            async with limit:
                return await _one(client, model, f"Tell me number {index} of your {streams} stories.", max_tokens)

        await limited(-1)
        began = time.perf_counter()
        results = await asyncio.gather(*(limited(index) for index in range(requests)))
        seconds = time.perf_counter() - began
    first = sorted(ttft for ttft, _ in results)
    return {
        "ttft_ms_median": 1000 * statistics.median(first),
        "ttft_ms_p95": 1000 * first[int(0.95 * (len(first) - 1))],
        "tpot_ms_median": 1000 * statistics.median(tpot for _, tpot in results),
        "tokens_per_second": requests * max_tokens / seconds,
    }


def measure(url: str, *, streams: int, requests: int, max_tokens: int = 64) -> dict[str, float]:
    """Latencies of ``requests`` streamed chats, ``streams`` at a time."""
    return asyncio.run(_measure(url, streams, requests, max_tokens))
