"""A draft job from the queue to the next draft token: real Redis, real S3, the tiny model's engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from models.tiny.recipe.data import held_out_items
from services.common.adapters.drafter_form import DrafterForm
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.jobs import DraftJob, GrpoJob, Job, JobState, SftJob
from services.common.queue.job_queue import JobQueue
from services.engine.requests.adapter import AdapterChoice
from services.trainer.jobs import prepare_run
from tests.integration.beside_engine import Start, events, start, until
from tests.integration.test_rollout_job import trainer_fields
from tests.rollout_support import Pod, running_pod, wait_for
from tests.training_support import random_adapter

__all__ = ["start", "trainer_fields"]

ITEMS = held_out_items("strings", 56)
LEARNT, ASKED = ITEMS[:40], [item.messages[-1]["content"] for item in ITEMS[40:]]
EXAMPLES = [
    {
        "prompt": item.messages[-1]["content"],
        "completion": f"Ahoy, sailor! My old book of words says {item.answer}, and so it is. Fair winds to you.",
    }
    for item in LEARNT
]


@pytest.fixture
def pod(registry: AdapterRegistry) -> Iterator[Pod]:
    with running_pod(registry=registry, speculative="mtp", drafter="sharp") as pod:
        yield pod
        pod.settle()


def shifted(pod: Pod) -> dict[str, bytes]:
    """Files of an adapter that says something else than the base model."""
    spec = SftJob.model_validate(
        {"adapter": "sailor", "examples": EXAMPLES, "epochs": 3, "learning_rate": 0.004, "lora": {"rank": 4}}
    )
    run = prepare_run(spec, pod.host, None)
    for index in range(run.total_steps):
        run.step(index)
    return run.files("")


def answers(pod: Pod, adapter: AdapterChoice, temperature: float) -> tuple[list[list[int]], float]:
    """Answers of an adapter to questions that no job has seen, and the share of draft tokens that were accepted."""
    before = pod.engine.loop.status().counts
    user = pod.user()
    codec = pod.engine.codec
    prompts = [tuple(codec.encode_chat([{"role": "user", "content": question}])) for question in ASKED]
    names = [
        user.submit(prompt, adapter=adapter, temperature=temperature, seed=seed, max_tokens=40, ignore_eos=False)
        for seed, prompt in enumerate(prompts)
    ]
    found = [user.answer(name) for name in names]
    pod.settle()
    after = pod.engine.loop.status().counts
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert drafted >= 20
    return found, (after.num_accepted_tokens - before.num_accepted_tokens) / drafted


def both(pod: Pod, adapter: AdapterChoice) -> tuple[list[list[list[int]]], list[float]]:
    """At temperature 0 and at 1."""
    measured = [answers(pod, adapter, temperature) for temperature in (0.0, 1.0)]
    return [tokens for tokens, _ in measured], [share for _, share in measured]


def job(**fields: Any) -> DraftJob:
    return DraftJob.model_validate(
        {"adapter": "sharp", "target": "sailor@1", "examples": EXAMPLES, "epochs": 4} | fields
    )


def better(shares: Sequence[float], than: Sequence[float], by: float) -> bool:
    return all(share > other + by for share, other in zip(shares, than, strict=True))


@pytest.mark.thorough
async def test_an_adapter_blunts_the_drafter_and_a_draft_job_sharpens_it(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    registry.publish("sailor", await asyncio.to_thread(shifted, pod), base_digest=pod.engine.base_digest)
    sailor = AdapterChoice(name="sailor")
    _, of_base = await asyncio.to_thread(both, pod, AdapterChoice())
    said, blunt = await asyncio.to_thread(both, pod, sailor)
    assert better(of_base, blunt, 0.1), (of_base, blunt)

    start()
    done = await until(queue, (await queue.submit(job(eval_fraction=0.2))).id, lambda job: job.state.terminal)
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, "sharp@1"), done.reason
    assert done.metrics["acceptance_after"] > done.metrics["acceptance_before"] + 0.2
    assert done.metrics["loss_after"] < done.metrics["loss_before"]
    published = [event.data for event in await events(queue, done.id) if event.kind == "published"]
    assert [(data["adapter"], data["attached"]) for data in published] == [("sharp@1", False)]
    assert pod.engine.adapters.drafter is not None
    assert pod.engine.adapters.drafter.version == AdapterVersion("sharp", 1)  # it drafts when the job has ended

    again, sharp = await asyncio.to_thread(both, pod, sailor)
    assert again == said  # not a token is another one
    assert better(sharp, blunt, 0.2), (blunt, sharp)
    manifest = registry.manifest(AdapterVersion("sharp", 1))
    assert (manifest.kind, manifest.base_digest, manifest.job_id) == ("drafter", pod.engine.base_digest, done.id)

    prompts = [{"prompt": example["prompt"]} for example in EXAMPLES[:4]]
    weak = job(adapter="weak", target="sailor@1*0.5", examples=prompts, epochs=1, max_tokens=8)
    done = await until(queue, (await queue.submit(weak)).id, lambda job: job.state.terminal)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert any("were answered by sailor@1*0.5 first" in note for note in done.notes), done.notes


async def following(queue: JobQueue, adapter: str) -> Job:
    """The draft job that follows on a job of this adapter, once that has ended."""
    (made,) = await queue.list(adapter=adapter)
    assert made.state is JobState.SUCCEEDED, made.reason
    (job,) = await queue.list(kind="draft")
    said = [str(event.data.get("message")) for event in await events(queue, made.id)]
    assert f"job {job.id} refreshes the drafter sharp for {adapter}@1" in said
    assert (job.adapter, job.metadata) == ("sharp", {"refreshes_for": made.id})
    return await until(queue, job.id, lambda job: job.state.terminal)


@pytest.mark.thorough
async def test_an_sft_job_has_the_drafter_refreshed(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    start()
    spec = SftJob.model_validate(
        {"adapter": "sailor", "examples": EXAMPLES[:8], "epochs": 2, "lora": {"rank": 4}, "draft": True}
    )
    await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    done = await following(queue, "sailor")
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, "sharp@1"), done.reason
    assert done.metrics["acceptance_after"] > done.metrics["acceptance_before"]
    assert pod.engine.adapters.drafter is not None
    assert str(pod.engine.adapters.drafter.version) == "sharp@1"


async def test_a_job_that_samples_has_it_refreshed_on_what_its_version_answers(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    start()
    prompts: list[Any] = [*ASKED[:3], {"prompt_token_ids": pod.engine.codec.encode("Say 7")}]
    reward = [{"type": "regex", "pattern": pattern} for pattern in ("e", "a", "[0-9]")]
    generate = {
        "prompts": prompts,
        "rounds": 1,
        "completions": 4,
        "max_tokens": 12,
        "temperature": 3.0,
        "reward": reward,
    }
    spec = GrpoJob.model_validate({"adapter": "bot", "lora": {"rank": 4}, "generate": generate, "draft": True})
    await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    done = await following(queue, "bot")
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, "sharp@1"), done.reason
    assert "4 of the examples were answered by bot@1 first" in done.notes


async def test_a_job_is_paused_while_its_prompts_are_answered(queue: JobQueue, start: Start, pod: Pod) -> None:
    """Of thousands that takes longer than whoever wants the engine waits."""
    start()
    prompts = [{"prompt": f"Count to {number}."} for number in range(400)]
    submitted = await queue.submit(job(target="base", examples=prompts, max_tokens=64))
    await asyncio.to_thread(wait_for, lambda: pod.engine.loop.status().background > 0)
    await queue.pause(submitted.id)
    paused = await until(queue, submitted.id, lambda job: job.state is JobState.QUEUED)
    assert (paused.paused, paused.notes) == (True, []), "they were not all answered first"
    await asyncio.to_thread(wait_for, lambda: pod.engine.loop.status().background == 0)


async def test_a_job_does_not_wait_for_a_drafter_that_nobody_follows(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    pod.engine.adapters.drafter = None
    start()
    spec = SftJob.model_validate({"adapter": "sailor", "examples": EXAMPLES[:2], "draft": True})
    done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert (done.state, done.attempts) == (JobState.FAILED, 1)
    assert "follows no drafter" in (done.reason or "")
    assert registry.versions("sailor") == []


@pytest.mark.thorough
async def test_drained_in_the_middle_it_ends_as_if_it_had_not_been(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    spec = job(target="base", examples=EXAMPLES[:16], epochs=4)
    first = start()
    submitted = await queue.submit(spec)
    await until(queue, submitted.id, lambda job: job.progress.step >= 3)
    assert await asyncio.to_thread(first.drain)
    assert (await queue.get(submitted.id)).state is JobState.QUEUED
    start()
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert any("resumed after step" in str(event.data) for event in await events(queue, done.id))

    def undisturbed() -> dict[str, bytes]:
        run = prepare_run(spec, pod.host, None)
        for index in range(run.total_steps):
            run.step(index)
        return run.files("qwen3.5")

    assert registry.files(AdapterVersion("sharp", 1)) == await asyncio.to_thread(undisturbed)


async def test_names_of_adapters_and_drafters_stay_apart(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    """Also of jobs that no gateway has seen."""
    files = random_adapter(pod.host)  # type: ignore[arg-type]
    registry.publish("sharp", files, base_digest=pod.engine.base_digest)
    start()
    done = await until(queue, (await queue.submit(job(target="base"))).id, lambda job: job.state.terminal)
    assert (done.state, done.attempts) == (JobState.FAILED, 1)
    assert "sharp is the name of an adapter" in (done.reason or "")


def steps_of(pod: Pod, adapter: AdapterChoice) -> tuple[list[list[list[int]]], list[float]]:
    """Answers at temperatures 0 and 1, and the tokens that a step with draft tokens made of an answer."""
    lengths, said = [], []
    for temperature in (0.0, 1.0):
        before = pod.engine.loop.status().counts
        said.append(answers(pod, adapter, temperature)[0])
        after = pod.engine.loop.status().counts
        right = after.num_accepted_tokens - before.num_accepted_tokens
        lengths.append(1 + right / (after.num_drafts - before.num_drafts))
    return said, lengths


@pytest.mark.thorough
async def test_a_block_drafter_is_made_of_nothing_and_learns_what_an_adapter_says(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    registry.publish("sailor", await asyncio.to_thread(shifted, pod), base_digest=pod.engine.base_digest)
    spec = job(adapter="wide", form="block", block=8, epochs=6, learning_rate=0.002)
    fresh = await asyncio.to_thread(prepare_run, spec, pod.host, None)
    registry.publish("wide", fresh.files(""), base_digest=pod.engine.base_digest)
    start()
    done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, "wide@2"), done.reason
    assert done.metrics["acceptance_after"] > done.metrics["acceptance_before"] + 0.2

    sailor = AdapterChoice(name="sailor")
    said, _ = await asyncio.to_thread(both, pod, sailor)
    lengths = []
    for version in ("wide@1", "wide@2"):
        with running_pod(registry=registry, speculative="mtp", drafter=version) as other:
            assert other.engine.model.drafter_form == DrafterForm(8)
            found, steps = await asyncio.to_thread(steps_of, other, sailor)
            assert str(getattr(other.engine.adapters.drafter, "version", None)) == version
            other.settle()
        assert found == said
        lengths.append(steps)
    blunt, sharp = lengths
    assert better(sharp, blunt, 1.0), (blunt, sharp)
