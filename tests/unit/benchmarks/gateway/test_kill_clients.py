"""What clients of a Temper under kills make of its answers: which is whole, which a breach."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from benchmarks.gateway.kill_clients import GIVEN_UP, End, Jobs, Question, ask

QUESTION = Question("Who are you?", 8, answer="I am Temper.", reason="length")
JOB = "job-1"
CURVE = {1: 2.0, 2: 1.0}


def event(data: object) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def piece(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"delta": {"content": text}, "finish_reason": reason}]})


DONE = b"data: [DONE]\n\n"
LOST = event({"error": {"code": "unavailable", "message": "the engine was lost"}})


class Broken(httpx.AsyncByteStream):
    """A body that ends with its connection."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        raise httpx.RemoteProtocolError("peer closed connection")


def away(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def silent(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing")


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (httpx.Response(200, content=piece("I am ") + piece("Temper.", "length") + DONE), End.WHOLE),
        (httpx.Response(200, content=piece("I am ") + piece("Tamper.", "length") + DONE), End.WRONG),
        (httpx.Response(200, content=piece("I am ", "length") + DONE), End.WRONG),
        (httpx.Response(200, content=piece("I am ") + piece("Temper.", "stop") + DONE), End.WRONG),
        (httpx.Response(200, content=piece("I am ") + LOST), End.CUT),
        (httpx.Response(200, content=piece("You are ") + LOST), End.WRONG),
        (httpx.Response(200, stream=Broken(piece("I am "))), End.CUT),
        (httpx.Response(200, stream=Broken(piece("You "))), End.WRONG),
        (httpx.Response(200, content=piece("I am ")), End.TRUNCATED),
        (httpx.Response(200, content=piece("I am Temper.", "length")), End.TRUNCATED),
        (httpx.Response(503, content=b"{}"), End.REFUSED),
        (httpx.Response(404, content=b"{}"), End.UNEXPECTED),
        (away, End.UNREACHABLE),
        (silent, End.HUNG),
    ],
)
async def test_an_answer_is_whole_or_told_to_be_none(answer: Any, end: End) -> None:
    transport = httpx.MockTransport(answer if callable(answer) else lambda _: answer)
    async with httpx.AsyncClient(base_url="http://temper", transport=transport) as client:
        assert (await ask(client, "m", QUESTION))[0] is end


def state(name: str) -> dict[str, Any]:
    return {"kind": "state", "data": {"state": name}}


def step(number: int, loss: float) -> dict[str, Any]:
    return {"kind": "progress", "data": {"step": number, "loss": loss}}


RUN = [state("queued"), state("running"), step(1, 2.0), step(2, 1.0)]
RESUMED = [state("queued"), state("running"), step(1, 2.0), state("running"), step(1, 2.0), step(2, 1.0)]
GONE = f"given up after 3 attempts: {GIVEN_UP}"


async def breaches(
    events: Sequence[dict[str, Any]],
    *,
    ended: str = "succeeded",
    reason: str | None = None,
    versions: Sequence[int] = (1,),
    jobs: int = 1,
    again: str = JOB,
) -> list[str]:
    """What a client finds of one job that it submitted, and whose end it saw."""

    def server(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/events"):
            return httpx.Response(200, content=b"".join(event(each) for each in events))
        if path.endswith("/versions"):
            return httpx.Response(200, json={"data": [{"version": number} for number in versions]})
        if request.method == "POST":
            return httpx.Response(202, json={"id": again})
        listed = [] if "after" in request.url.params else [{"id": JOB, "adapter": "a"}] * jobs
        return httpx.Response(200, json={"data": listed})

    async with httpx.AsyncClient(base_url="http://temper", transport=httpx.MockTransport(server)) as client:
        seen = {"id": JOB, "state": ended, "reason": reason, "result_adapter": "a@1"}
        clients = Jobs(client, "a", accepted={"a": JOB}, ended={"a": seen})
        await clients.audit(CURVE)
        return clients.breaches


@pytest.mark.parametrize(
    "job",
    [
        {"events": [*RUN, state("succeeded")]},
        {"events": [*RESUMED, state("succeeded")]},
        {"events": [*RUN, state("failed")], "ended": "failed", "reason": GONE, "versions": ()},
    ],
)
async def test_a_job_that_ended_once(job: dict[str, Any]) -> None:
    assert await breaches(**job) == []


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"events": RUN}, "ended as"),
        ({"events": [*RUN, state("succeeded"), state("succeeded")]}, "ended as"),
        ({"events": [*RUN, state("failed")]}, "ended as"),
        ({"events": [*RUN, state("succeeded")], "versions": (1, 2)}, "has the versions"),
        ({"events": [*RUN, state("succeeded")], "versions": ()}, "has the versions"),
        ({"events": [*RUN[:-1], state("succeeded")]}, "its last report"),
        ({"events": [*RUN[:-1], step(2, 1.1), state("succeeded")]}, "undisturbed"),
        ({"events": [*RUN, step(2, 1.0), state("succeeded")]}, "twice in one attempt"),
        ({"events": [*RUN, state("failed")], "ended": "failed", "reason": "a bug", "versions": ()}, "a bug"),
        ({"events": [*RUN, state("succeeded")], "jobs": 2}, "there are 2 jobs"),
        ({"events": [*RUN, state("succeeded")], "jobs": 0}, "there are 0 jobs"),
        ({"events": [*RUN, state("succeeded")], "again": "job-2"}, "makes another job"),
    ],
)
async def test_a_job_that_did_not(job: dict[str, Any], says: str) -> None:
    found = await breaches(**job)
    assert len(found) == 1
    assert says in found[0]
