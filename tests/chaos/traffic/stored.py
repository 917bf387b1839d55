"""Stored documents: responses that are kept, and feedback, written, read and removed by either gateway."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.gateway.kill_clients import ANSWER_SECONDS
from tests.chaos.histories.models import ABSENT, Register
from tests.chaos.histories.recorder import Recorder, Wrong
from tests.chaos.traffic.answers import Answer, Version
from tests.chaos.traffic.part import Part

_QUESTION = "What is 12 plus 7?"
_TOKENS = 24


async def known_responses(client: httpx.AsyncClient, models: Mapping[Version, str]) -> dict[Version, Answer]:
    """What each version answers the question of this part, undisturbed."""
    found = {}
    for version, model in models.items():
        told = (await client.post("/v1/responses", json=_body(model) | {"store": False})).raise_for_status().json()
        found[version] = Answer(_text(told), told["status"])
    return found


def _body(model: str) -> dict[str, Any]:
    return {"model": model, "input": _QUESTION, "max_output_tokens": _TOKENS, "temperature": 0}


def _text(response: Mapping[str, Any]) -> str:
    items = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part.get("text", "") for item in items for part in item["content"])


class Responses(Part):
    """Clients of /v1/responses: each is stored, in the foreground or the background, read and removed."""

    name = "responses"

    def __init__(
        self,
        clients: Sequence[httpx.AsyncClient],
        seed: str,
        models: Sequence[str],
        known: Mapping[Version, Answer],
    ) -> None:
        super().__init__(clients, seed)
        self._models = models
        self._known = known
        self._stored = Recorder("response", Register())
        self._background: dict[str, None] = {}
        """Ids of those that ran in the background when they were looked at last."""
        self.recorders.append(self._stored)

    async def turn(self, rng: random.Random) -> None:
        background = rng.random() < 0.4
        model = rng.choice(self._models)
        key = rng.randbytes(8).hex()
        try:
            response = await rng.choice(self.clients).post(
                "/v1/responses", json=_body(model) | {"background": background}
            )
        except httpx.ReadTimeout:
            self.breaches.append(f"a response said nothing for {ANSWER_SECONDS:.0f} s")
            return
        except httpx.TransportError:
            self.counts["unreachable"] += 1
            return
        if response.status_code >= 500:
            self.counts["refused"] += 1
            if response.status_code == 500:
                self.breaches.append(f"a 500 to POST /v1/responses: {response.text[:200]}")
            return
        if response.status_code != 200:
            self.breaches.append(f"POST /v1/responses: {response.status_code} {response.text[:300]}")
            return
        told = response.json()
        if background:
            self._background[told["id"]] = None
            self.counts["begun"] += 1
            return
        self.counts["answered"] += 1
        self._judge(told)
        if told["store"]:
            await self._read_and_remove(rng, key, told)

    def _judge(self, told: Mapping[str, Any]) -> None:
        """Holds one that has ended to what its version says."""
        expected = self._known.get(told["adapter"])
        if told["status"] not in ("completed", "incomplete"):
            self.counts[f"told {told['status']}"] += 1
            if expected is not None and not expected.text.startswith(_text(told)):
                self.breaches.append(f"the response {told['id']} failed with {_text(told)!r}, no beginning")
        elif expected != Answer(_text(told), told["status"]):
            self.breaches.append(f"the response {told['id']} of {told['adapter']} says {_text(told)!r}, not {expected}")

    async def _read_and_remove(self, rng: random.Random, key: str, told: Mapping[str, Any]) -> None:
        path, text = f"/v1/responses/{told['id']}", _text(told)
        self._stored.note(key, "write", text, True, 0.0, 0.0)

        def seen(response: httpx.Response) -> Any:
            if response.status_code == 404:
                return ABSENT
            if response.status_code == 200:
                return _text(response.json())
            raise Wrong("neither there nor absent")

        def removed(response: httpx.Response) -> Any:
            if response.status_code in (200, 404):
                return True
            raise Wrong("neither removed nor absent")

        steps = [("read", "GET", seen), ("read", "GET", seen)]
        if rng.random() < 0.5:
            steps += [("remove", "DELETE", removed), ("read", "GET", seen)]
        for name, method, read in steps:
            await self._stored.send(rng.choice(self.clients), key, name, None, method, path, read)

    async def finish(self) -> None:
        """Every response that was begun has ended, and is what it should be."""
        rng = random.Random(self.seed)
        for name in self._background:
            told = (await self.tried(rng, "GET", f"/v1/responses/{name}")).json()
            if "output" not in told:
                self.breaches.append(f"the response {name} is lost: {str(told)[:300]}")
                continue
            self.counts[f"background {told['status']}"] += 1
            if told["status"] in ("queued", "in_progress"):
                self.breaches.append(f"the response {name} is still {told['status']}")
            else:
                self._judge(told)
        await super().finish()


class Feedback(Part):
    """Clients that say something of answers, say something else, and take it back."""

    name = "feedback"

    def __init__(self, clients: Sequence[httpx.AsyncClient], seed: str) -> None:
        super().__init__(clients, seed)
        self._opinions = Recorder("opinion", Register())
        self.recorders.append(self._opinions)
        self._numbers = itertools.count()

    async def turn(self, rng: random.Random) -> None:
        answer = f"chatcmpl-{rng.randbytes(8).hex()}"

        def said(response: httpx.Response) -> Any:
            if response.status_code in (200, 201):
                return True
            raise Wrong("not taken")

        def heard(response: httpx.Response) -> Any:
            if response.status_code != 200:
                raise Wrong("not told")
            scores = [one["score"] for one in response.json()["data"]]
            if len(scores) > 1:
                raise Wrong("more than one opinion of one user")
            return scores[0] if scores else ABSENT

        def forgotten(response: httpx.Response) -> Any:
            if response.status_code != 200:
                raise Wrong("not removed")
            return True

        about = {"answer": answer, "user": "u"}
        for _ in range(rng.randrange(2, 6)):
            client, turn = rng.choice(self.clients), rng.random()
            if turn < 0.5:
                score = round(rng.uniform(-1, 1), 3)
                body = {"completion_id": answer, "score": score, "user": "u"}
                sent = self._opinions.send(client, answer, "write", score, "POST", "/v1/feedback", said, json=body)
            elif turn < 0.9:
                sent = self._opinions.send(client, answer, "read", None, "GET", "/v1/feedback", heard, params=about)
            else:
                sent = self._opinions.send(
                    client, answer, "remove", None, "DELETE", "/v1/feedback", forgotten, params=about
                )
            await sent
        self.counts["opinions"] += 1
