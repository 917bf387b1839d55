"""Ground: what a campaign stands on before anything breaks: adapters with versions, a suite, and known answers."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from tests.chaos.traffic.answers import Answer, Question, Version, known_questions
from tests.chaos.traffic.jobs import SUITE, sft
from tests.chaos.traffic.stored import known_responses

MOVED, ATTACHED = "chaos-moved", ("chaos-one", "chaos-two")
_EPOCHS = 6
_ITEMS = '{"prompt": "What is 12 plus 7?", "expected": 19}\n{"prompt": "And 2 plus 2?", "expected": 4}'


@dataclass(frozen=True, slots=True)
class Ground:
    """Versions that there are, and what each answers.

    Args:
        models: names to ask for; the first is the base model's.
        files: of a version, to be published again.
    """

    models: tuple[str, ...]
    versions: tuple[str, ...]
    questions: Sequence[Question]
    responses: dict[Version, Answer]
    files: dict[str, bytes]


async def prepared(client: httpx.AsyncClient, model: str) -> Ground:
    """Trains the versions, and asks each everything."""
    wanted = [(MOVED, 1e-3), (ATTACHED[0], 3e-3), (ATTACHED[1], 5e-3)]
    await asyncio.gather(*(_trained(client, adapter, rate) for adapter, rate in wanted))
    await _trained(client, MOVED, 8e-3)
    versions = (f"{MOVED}@1", f"{MOVED}@2", *(f"{name}@1" for name in ATTACHED))
    suite = {"name": SUITE, "scorer": {"type": "numeric"}, "sampling": {"max_tokens": 8}, "jsonl": _ITEMS}
    (await client.post("/v1/eval/suites", json=suite)).raise_for_status()
    by_version: dict[Version, str] = {None: model, **{version: version for version in versions}}
    questions, responses, files = await asyncio.gather(
        known_questions(client, by_version), known_responses(client, by_version), _files(client, ATTACHED[0])
    )
    return Ground((model, MOVED, *versions), versions, questions, responses, files)


async def _trained(client: httpx.AsyncClient, adapter: str, rate: float) -> None:
    job = (await client.post("/v1/train/sft", json=sft(adapter, _EPOCHS, rate))).raise_for_status().json()
    while job["state"] in ("queued", "running"):
        await asyncio.sleep(0.1)
        job = (await client.get(f"/v1/train/jobs/{job['id']}")).raise_for_status().json()
    if job["state"] != "succeeded":
        raise RuntimeError(f"{adapter} could not be trained, though nothing was broken: {job}")


async def _files(client: httpx.AsyncClient, adapter: str) -> dict[str, bytes]:
    archive = (await client.get(f"/v1/adapters/{adapter}/download")).raise_for_status().content
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        members = [(member, packed.extractfile(member)) for member in packed.getmembers() if member.isfile()]
        found = {member.name.rpartition("/")[2]: content.read() for member, content in members if content is not None}
    return {name: data for name, data in found.items() if name.startswith("adapter_")}
