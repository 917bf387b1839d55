"""Traffic of a soak: chats, sessions, responses, conversations, feedback, batches, jobs, swaps and training sessions,
each by clients of its own, one call after the other."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.jobs import EXAMPLES

_WORDS = ("amber", "birch", "coral", "dune", "ember", "fjord", "grove", "heron")
_RETRIED = frozenset({429, 503})
_VERSIONS = 4
"""Versions after which an adapter is deleted, and begins anew."""
_ROWS = [{"token_ids": list(range(40, 60))}, {"token_ids": list(range(100, 110))}]


@dataclass
class Traffic:
    """What was done, and what went wrong."""

    client: httpx.AsyncClient
    rng: random.Random
    model: str
    pause: float
    done: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    requests: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Traffic until it is ``over``."""
        clients = [self.chat, self.chat, self.session, self.response, self.batch, self.job, self.training_session]
        await asyncio.gather(*(self._repeat(client) for client in clients))

    async def _repeat(self, once: Callable[[], Awaitable[None]]) -> None:
        while not self.over.is_set():
            try:
                await once()
                self.done[once.__name__] += 1
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self.problems.append(f"{once.__name__}: {error!r}"[:500])
            await asyncio.sleep(self.rng.uniform(0.0, 2 * self.pause))

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """JSON of an answer; what is refused for a moment is asked again."""
        for _ in range(100):
            self.requests += 1
            answer = await self.client.request(method, path, **options)
            if answer.status_code not in _RETRIED:
                break
            await asyncio.sleep(0.2)
        if answer.status_code >= 300:
            raise ValueError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text

    async def _until(self, path: str, field_name: str, ends: set[str], pause: float = 0.25) -> Any:
        while True:
            found = await self.ask("GET", path)
            if found[field_name] in ends:
                return found
            await asyncio.sleep(pause)

    def _said(self) -> str:
        return " ".join(self.rng.choices(_WORDS, k=self.rng.randint(2, 40)))

    async def chat(self) -> None:
        """A stream, and an opinion on it."""
        body = {"model": self.model, "messages": [{"role": "user", "content": self._said()}], "max_tokens": 12}
        self.requests += 1
        async with self.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            if answer.status_code in _RETRIED:
                return
            assert answer.status_code == 200, answer.status_code
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines[-1]
        answered = json.loads(lines[0])["id"]
        await self.ask(
            "POST", "/v1/feedback", json={"completion_id": answered, "thumb": self.rng.choice(["up", "down"])}
        )

    async def session(self) -> None:
        """A conversation of a few turns."""
        name, messages = f"s-{self.rng.randrange(10**9)}", list[dict[str, str]]()
        for _ in range(self.rng.randint(1, 4)):
            messages.append({"role": "user", "content": self._said()})
            body = {"model": self.model, "messages": messages, "max_tokens": 10, "session_id": name}
            answer = await self.ask("POST", "/v1/chat/completions", json=body)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "."})

    async def response(self) -> None:
        """Stored responses, some in the background, and a conversation that they are added to."""
        kept = await self.ask("POST", "/v1/conversations", json={})
        body = {"model": self.model, "input": self._said(), "max_output_tokens": 8}
        await self.ask("POST", "/v1/responses", json={**body, "conversation": kept["id"]})
        made = await self.ask("POST", "/v1/responses", json={**body, "background": True})
        ended = await self._until(f"/v1/responses/{made['id']}", "status", {"completed", "incomplete", "failed"})
        assert ended["status"] != "failed", ended

    async def batch(self) -> None:
        """A batch, whose files are read and deleted."""
        body = {"model": self.model, "prompt": self._said(), "max_tokens": 4}
        lines = [
            {"custom_id": f"n-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            for number in range(3)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = await self.ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", content)})
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        made = await self.ask("POST", "/v1/batches", json=asked)
        ended = await self._until(
            f"/v1/batches/{made['id']}", "status", {"completed", "failed", "expired", "cancelled"}
        )
        assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 3), ended
        result = await self.ask("GET", f"/v1/files/{ended['output_file_id']}/content")
        assert len(result.splitlines()) == 3, result
        for one in (file["id"], ended["output_file_id"]):
            await self.ask("DELETE", f"/v1/files/{one}")

    async def job(self) -> None:
        """An adapter trained some times, swapped in each time, and deleted at last."""
        name = self.rng.choice(["soak-a", "soak-b"])
        for _ in range(_VERSIONS):
            if self.over.is_set():
                return
            body = {"adapter": name, "examples": EXAMPLES[:4], "learning_rate": 1e-3, "epochs": 2, "attach": True}
            made = await self.ask("POST", "/v1/train/sft", json={**body, "lora": {"rank": 2}, "checkpoint_every": 1})
            ended = await self._until(f"/v1/train/jobs/{made['id']}", "state", {"succeeded", "failed", "cancelled"})
            assert ended["state"] == "succeeded", ended
            self.done["swap"] += 1
        await self.ask("POST", f"/v1/adapters/{name}/detach")
        await self.ask("DELETE", f"/v1/adapters/{name}")

    async def training_session(self) -> None:
        """A training session with a step, closed at its end."""
        made = await self.ask("POST", "/v1/train/sessions", json={"lora": {"rank": 2}})
        at = f"/v1/train/sessions/{made['id']}"
        calls: list[tuple[str, dict[str, Any]]] = [
            ("forward_backward", {"loss": "cross_entropy", "data": _ROWS}),
            ("optim_step", {"learning_rate": 1e-3}),
        ]
        for seq, (call, body) in enumerate(calls, 1):
            future = await self.ask("POST", f"{at}/{call}", json={"seq": seq, **body})
            ended = await self._until(f"/v1/train/futures/{future['id']}", "state", {"done", "failed"})
            assert ended["state"] == "done", ended
        await self.ask("DELETE", at)
        await asyncio.sleep(self.pause * 20)
