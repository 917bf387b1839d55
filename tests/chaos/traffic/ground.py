"""Ground: what a campaign stands on before anything breaks: adapters with versions, a suite, and known answers."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
from safetensors.numpy import load, save

from tests.chaos.traffic.answers import Answer, Question, Version, known_questions
from tests.chaos.traffic.jobs import SUITE, sft
from tests.chaos.traffic.stored import known_responses

MOVED, ATTACHED = "chaos-moved", ("chaos-one", "chaos-two")
_EPOCHS, _RATE = 6, 3e-3
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


async def prepared(client: httpx.AsyncClient, model: str, questions: int) -> Ground:
    """Trains a version, makes others of it, and asks each as many questions of each shape."""
    await _trained(client, ATTACHED[0])
    files = await _files(client, ATTACHED[0])
    for adapter, factor in ((MOVED, 3.0), (MOVED, -2.0), (ATTACHED[1], 6.0)):
        answer = await client.post("/v1/adapters", data={"name": adapter}, files=_scaled(files, factor))
        answer.raise_for_status()
    versions = (f"{MOVED}@1", f"{MOVED}@2", *(f"{name}@1" for name in ATTACHED))
    suite = {"name": SUITE, "scorer": {"type": "numeric"}, "sampling": {"max_tokens": 8}, "jsonl": _ITEMS}
    (await client.post("/v1/eval/suites", json=suite)).raise_for_status()
    by_version: dict[Version, str] = {None: model, **{version: version for version in versions}}
    asked, responses = await asyncio.gather(
        known_questions(client, by_version, questions), known_responses(client, by_version)
    )
    return Ground((model, MOVED, *versions), versions, asked, responses, files)


async def _trained(client: httpx.AsyncClient, adapter: str) -> None:
    job = (await client.post("/v1/train/sft", json=sft(adapter, _EPOCHS, _RATE))).raise_for_status().json()
    while job["state"] in ("queued", "running"):
        await asyncio.sleep(0.1)
        job = (await client.get(f"/v1/train/jobs/{job['id']}")).raise_for_status().json()
    if job["state"] != "succeeded":
        raise RuntimeError(f"{adapter} could not be trained, though nothing was broken: {job}")


def _scaled(files: Mapping[str, bytes], factor: float) -> dict[str, bytes]:
    """Files of another version: what the adapter adds, times a factor."""
    tensors = load(files["adapter_model.safetensors"])
    scaled = {name: value * value.dtype.type(factor if "lora_B" in name else 1) for name, value in tensors.items()}
    return {**files, "adapter_model.safetensors": save(scaled)}


async def _files(client: httpx.AsyncClient, adapter: str) -> dict[str, bytes]:
    archive = (await client.get(f"/v1/adapters/{adapter}/download")).raise_for_status().content
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        members = [(member, packed.extractfile(member)) for member in packed.getmembers() if member.isfile()]
        found = {member.name.rpartition("/")[2]: content.read() for member, content in members if content is not None}
    return {name: data for name, data in found.items() if name.startswith("adapter_")}
