"""Batches: files of requests, each answered once and as its version answers it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

from tests.chaos.traffic.answers import Question, said_in
from tests.chaos.traffic.part import Part

_ENDS = ("completed", "failed", "expired", "cancelled")
_LINES = 5


class Batches(Part):
    """A client that keeps one batch unfinished."""

    name = "batches"
    pause = 0.5

    def __init__(
        self, clients: Sequence[httpx.AsyncClient], seed: str, models: Sequence[str], questions: Sequence[Question]
    ) -> None:
        super().__init__(clients, seed)
        self._models = [model for model in models if "@" in model]
        self._questions = questions
        self._numbers = itertools.count()
        self._running: dict[str, dict[str, tuple[str, Question]]] = {}
        """(model, question) by custom id, of each batch that has not ended."""

    async def turn(self, rng: random.Random) -> None:
        if self._running:
            for batch in list(self._running):
                await self._look(rng, batch)
            return
        await self._submit(rng)

    async def _submit(self, rng: random.Random) -> None:
        number = next(self._numbers)
        asked = {f"{number}-{n}": (rng.choice(self._models), rng.choice(self._questions)) for n in range(_LINES)}
        lines = [
            {
                "custom_id": name,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {**question.body, "model": model, "temperature": 0},
            }
            for name, (model, question) in asked.items()
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        # A file whose answer is lost is uploaded again: another one, which nobody names.
        file = await self.tried(
            rng, "POST", "/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}
        )
        if file.status_code != 200:
            self.breaches.append(f"a file was refused: {file.status_code} {file.text[:300]}")
            return
        body = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        headers = {"idempotency-key": f"{self.seed}-{number}"}
        batch = await self.tried(rng, "POST", "/v1/batches", json=body, headers=headers)
        if batch.status_code != 200:
            self.breaches.append(f"a batch was refused: {batch.status_code} {batch.text[:300]}")
            return
        self._running[batch.json()["id"]] = asked
        again = await self.tried(rng, "POST", "/v1/batches", json=body, headers=headers)
        if again.json().get("id") != batch.json()["id"]:
            self.breaches.append(f"the key of the batch {batch.json()['id']} makes another: {again.text[:200]}")
        self.counts["submitted"] += 1

    async def _look(self, rng: random.Random, batch: str) -> bool:
        """Judges a batch that has ended; whether it has."""
        response = await self.tried(rng, "GET", f"/v1/batches/{batch}")
        told = response.json()
        if response.status_code != 200:
            self.breaches.append(f"the batch {batch} is lost: {response.status_code} {response.text[:300]}")
        elif told["status"] not in _ENDS:
            return False
        else:
            self.counts[told["status"]] += 1
            if told["status"] != "completed":
                self.breaches.append(f"the batch {batch} is {told['status']}: {told['errors']}")
            else:
                await self._judge(rng, told, self._running[batch])
        del self._running[batch]
        return True

    async def _judge(self, rng: random.Random, batch: dict[str, Any], asked: dict[str, tuple[str, Question]]) -> None:
        rows = []
        for kind in ("output_file_id", "error_file_id"):
            if batch[kind] is not None:
                content = await self.tried(rng, "GET", f"/v1/files/{batch[kind]}/content")
                rows += [json.loads(line) for line in content.text.splitlines()]
        names = [row["custom_id"] for row in rows]
        if sorted(names) != sorted(asked):
            self.breaches.append(f"the batch {batch['id']} answers {sorted(names)}, and was asked {sorted(asked)}")
            return
        for row in rows:
            model, question = asked[row["custom_id"]]
            response = row.get("response") or {}
            if response.get("status_code") != 200:
                self.counts["requests failed"] += 1
                self.breaches.append(f"a request of the batch {batch['id']} failed: {str(row)[:300]}")
                continue
            told = response["body"]
            self.counts["requests answered"] += 1
            if told["adapter"] != model or said_in(told) != question.answers[model]:
                self.breaches.append(f"the batch {batch['id']} answers {question.shape} of {model} with {told}")

    async def finish(self) -> None:
        """Every batch ends."""
        rng = random.Random(self.seed)
        while self._running:
            await self.turn(rng)
        await super().finish()
