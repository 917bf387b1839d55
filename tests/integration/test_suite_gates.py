"""Gates on suites, from the queue to the manifest: real Redis, real S3, the tiny model's engine in this process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.evaluation.contamination.store import DataSource, TrainingHashes
from services.common.evaluation.runs.records import CANDIDATE
from services.common.evaluation.runs.store import SHARD_ITEMS, EvaluationStore
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import Job, JobState, SftJob
from services.common.queue.job_queue import JobQueue
from services.common.storage.object_store import ObjectStore
from services.trainer.evaluation.divergence import MAX_TOKENS, prompts_of
from services.trainer.host.rollouts import Completion, RolloutSampling
from tests.integration.beside_engine import Start, events, pod, start, until
from tests.integration.test_evaluation_job import made
from tests.rollout_support import TINY, Pod

__all__ = ["pod", "start"]
SUMS, MANY = 20, SHARD_ITEMS + 6
"""Items of the suite that must not suffer, and of one that has more than a shard."""


@pytest.fixture
def suites(store: ObjectStore) -> SuiteStore:
    """Words that the model does not know how to answer yet, and small sums, which it knows."""
    suites = SuiteStore(store)
    words = [{"prompt": f"Say the word number {n}.", "expected": "pineapple"} for n in range(20)]
    words.append({"prompt": "too long for the context " * 200, "expected": "pineapple"})
    sums = [{"prompt": f"What is {n} plus {n + 1}?", "expected": 2 * n + 1} for n in range(MANY)]
    made(suites, "words", words, scorer={"type": "contains"}, sampling={"max_tokens": 8})
    for name, count in (("sums", SUMS), ("many", MANY)):
        made(suites, name, sums[:count], scorer={"type": "exact"}, sampling={"max_tokens": 6})
    return suites


def job(**fields: Any) -> SftJob:
    """Teaches the word, with other questions than the suite's."""
    examples = [{"prompt": f"Say word number {n}!", "completion": "pineapple"} for n in range(8)]
    return SftJob.model_validate(
        {"adapter": "fruit", "examples": examples, "lora": {"rank": 4}, "learning_rate": 1e-2, "epochs": 5, **fields}
    )


async def ended(queue: JobQueue, spec: SftJob) -> Job:
    return await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)


async def test_a_gain_is_published_with_its_evidence_and_a_loss_is_not_attached(
    queue: JobQueue, store: ObjectStore, registry: AdapterRegistry, suites: SuiteStore, start: Start
) -> None:
    worker = start()
    spec = job(
        publish_if={"gain": [{"suite": "words", "min_gain": 0.1}], "alpha": 0.01},
        attach_if={"no_loss": [{"suite": "sums", "max_loss": 0.05}]},
    )
    done = await ended(queue, spec)
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, "fruit@1"), done.reason
    assert done.evaluation is not None
    assert registry.attached() is None, "what says pineapple to everything has forgotten its sums"
    manifest = registry.manifest(AdapterVersion("fruit", 1))
    published, attached = manifest.gates
    assert (published.gate, published.passed, published.against) == ("publish_if", True, "base")
    assert (attached.gate, attached.passed) == ("attach_if", False)
    assert published.evaluation == attached.evaluation == done.evaluation
    assert published.candidate == manifest.digest, "what was tried is what was published"
    (words,), (sums,) = published.conditions, attached.conditions
    assert (words.suite, words.items, words.before, words.at_least, words.alpha) == ("words@1", 21, 0.0, 0.1, 0.01)
    assert words.invalid == (1, 1), "what nobody can answer counts for both"
    assert words.after <= 20 / 21
    assert words.digest == suites.get("words").digest
    assert words.p < 0.01 < 0.05 < sums.p
    assert words.interval[0] > 0.1
    assert (sums.items, sums.kind, sums.at_least) == (SUMS, "no_loss", -0.05)
    runs = EvaluationStore(store)
    record = runs.record(done.evaluation)
    assert record is not None
    assert (record.job, [target.name for target in record.targets]) == (done.id, ["base", CANDIDATE])
    assert runs.gates(done.evaluation) == manifest.gates
    assert runs.of_version(manifest.ref).newest() == [done.evaluation]
    said = " ".join(done.notes)
    assert "publish_if is met against base: words@1" in said
    assert "attach_if is not met against base: sums@1" in said
    told = [event.data for event in await events(queue, done.id) if event.kind == "eval"]
    assert {(one["suite"], one["target"]) for one in told if "suite" in one} == {
        (suite, target) for suite in ("words@1", "sums@1") for target in ("base", CANDIDATE)
    }
    half = {"no_loss": [{"suite": "sums", "max_loss": 0.5}], "against": "fruit*0.5", "max_kl": 100}
    # The next version is compared with this one by default, and there is nothing left to gain.
    missed = await ended(queue, job(publish_if={"gain": [{"suite": "words"}]}, attach_if=half, epochs=1))
    assert (missed.state, missed.attempts) == (JobState.FAILED, 1)
    assert "publish_if is not met against fruit@1: words@1" in (missed.reason or "")
    assert missed.evaluation is not None
    assert missed.evaluation in (missed.reason or "")
    against_parent, against_half = runs.gates(missed.evaluation)
    assert against_parent.passed is False, "it stays readable"
    assert (against_half.against, against_half.conditions[0].items) == ("fruit@1*0.5", SUMS)
    assert against_half.divergence is not None
    assert against_half.divergence.tokens > 0
    assert registry.current("fruit") == AdapterVersion("fruit", 1)
    assert await asyncio.to_thread(worker.drain)  # what it keeps for another attempt is gone by then
    hashes = TrainingHashes(registry)
    assert hashes.begun(DataSource(adapter="fruit", job_id=done.id)) is not None
    assert hashes.begun(DataSource(adapter="fruit", job_id=missed.id)) is None


@pytest.mark.thorough
async def test_a_version_stays_near_the_one_before(
    queue: JobQueue, store: ObjectStore, registry: AdapterRegistry, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    """By the divergence that transformers computes of the same answers."""
    start()
    gate = {"gain": [{"suite": "words"}], "no_loss": [{"suite": "sums", "max_loss": 0.99}], "max_kl": 900.0}
    done = await ended(queue, job(publish_if=gate, seed=5))
    assert done.state is JobState.SUCCEEDED, done.reason
    (evidence,) = registry.manifest(AdapterVersion("fruit", 1)).gates
    found = evidence.divergence
    assert found is not None
    assert (found.prompts, found.max_kl, found.passed) == (20 + SUMS, 900.0, True), "without the one that does not fit"
    assert found.interval[0] < found.kl < found.interval[1]
    assert "KL " in " ".join(done.notes)

    host, chosen = pod.host, [suites.get(name) for name in ("words", "sums")]
    requests = [one for one, _ in prompts_of(suites, chosen, host.rollouts, host.codec, 5)]
    answers = host.rollouts.generate(requests, RolloutSampling(1.0, MAX_TOKENS), None)
    files = registry.files(AdapterVersion("fruit", 1))
    expected = await asyncio.to_thread(divergence_of, files, [one.prompt for one in requests], answers)
    assert found.tokens == sum(len(one.token_ids) for one in answers)
    assert found.kl == pytest.approx(expected, rel=1e-3)
    assert expected > 0.5, "it says pineapple to everything"

    refused = await ended(queue, job(adapter="apple", publish_if={**gate, "max_kl": expected / 2}, seed=5))
    assert (refused.state, refused.result_adapter) == (JobState.FAILED, None)
    assert f"KL {found.kl:.3g} a token" in (refused.reason or "")
    assert "not shown" in (refused.reason or "")
    (evidence,) = EvaluationStore(store).gates(refused.evaluation or "")
    assert (evidence.passed, all(one.passed for one in evidence.conditions)) == (False, True)


def divergence_of(files: Mapping[str, bytes], prompts: Sequence[Sequence[int]], answers: Sequence[Completion]) -> float:
    """Mean over tokens of log p_base - log p_adapter, in float32 by transformers and PEFT."""
    with tempfile.TemporaryDirectory() as directory:
        for name, data in files.items():
            (Path(directory) / name).write_bytes(data)
        base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
        model = PeftModel.from_pretrained(base, directory).eval()

    def logprobs(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].double()
        return logits.log_softmax(-1).gather(-1, torch.tensor([answer]).T).flatten()

    differences = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            with model.disable_adapter():
                before = logprobs(prompt, answer.token_ids)
            differences.append(before - logprobs(prompt, answer.token_ids))
    return float(torch.cat(differences).mean())


@pytest.mark.thorough
async def test_a_job_that_is_handed_on_goes_on_with_its_answers(
    queue: JobQueue, store: ObjectStore, registry: AdapterRegistry, suites: SuiteStore, start: Start
) -> None:
    first = start()
    submitted = await queue.submit(job(publish_if={"no_loss": [{"suite": "many", "max_loss": 0.99}]}, epochs=1))
    await until(queue, submitted.id, lambda job: job.metrics.get("gate_items_done", 0) >= MANY + SHARD_ITEMS)
    assert await asyncio.to_thread(first.drain)
    runs = EvaluationStore(store)
    (run,) = runs.all.newest()
    kept = runs.shard(run, 0, 1, 0)
    assert kept is not None
    assert runs.result(run) is None
    start()
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert (done.state, done.evaluation) == (JobState.SUCCEEDED, run), done.reason
    assert (runs.all.newest(), runs.shard(run, 0, 1, 0)) == ([run], kept)


@pytest.mark.thorough
async def test_a_suite_that_is_trained_on_does_not_decide(
    queue: JobQueue, registry: AdapterRegistry, suites: SuiteStore, start: Start
) -> None:
    start()
    leaked = [{"prompt": f"Say the word number {n}.", "completion": "pineapple"} for n in (3, 103, 203, 303)]
    refused = await ended(queue, job(examples=leaked, publish_if={"gain": [{"suite": "words"}]}))
    assert refused.state is JobState.FAILED
    assert refused.progress.total_steps == 0, "before the first step"
    assert "1 of 21 items of words@1 occur in the training data" in (refused.reason or "")
    assert "1 as a whole prompt: 4; train without" in (refused.reason or "")
    asked = {"gain": [{"suite": "words"}], "allow_contaminated": True}
    done = await ended(queue, job(examples=leaked, publish_if=asked))
    assert done.state is JobState.SUCCEEDED, done.reason
    (gate,) = registry.manifest(AdapterVersion("fruit", 1)).gates
    assert [(one.contaminated, one.exact) for one in gate.contamination] == [(1, 1)]
    # Its successor inherits that, whatever it is trained on itself.
    heir = await ended(queue, job(publish_if={"gain": [{"suite": "words"}]}, epochs=1))
    assert "1 of 21 items" in (heir.reason or "")


@pytest.mark.thorough
async def test_what_cannot_decide_says_so(
    queue: JobQueue, registry: AdapterRegistry, suites: SuiteStore, start: Start
) -> None:
    start()
    gone = await ended(queue, job(publish_if={"gain": [{"suite": "gone"}]}))
    assert "suite 'gone' does not exist" in (gone.reason or "")
    made(suites, "few", [{"prompt": f"Word {n}?", "expected": "no"} for n in range(3)], scorer={"type": "contains"})
    hopeless = {"gain": [{"suite": "few"}], "no_loss": [{"suite": "sums", "max_loss": 0.01}]}
    submitted = await queue.submit(job(publish_if=hopeless))
    told = await until(queue, submitted.id, lambda job: len(job.notes) > 1)
    assert "few@1 has 3 items: this suite sees no gain at all" in told.notes[0]
    assert "this suite sees differences above 0.14 only" in told.notes[1]
    assert "a max_loss of 0.01 needs 299 items" in told.notes[1]
    # Cancelled, or its suite deleted, behind the last step.
    await until(queue, submitted.id, lambda job: "gate_items" in job.metrics)
    await queue.cancel(submitted.id)
    assert (await until(queue, submitted.id, lambda job: job.state.terminal)).state is JobState.CANCELLED
    submitted = await queue.submit(job(publish_if={"gain": [{"suite": "words"}]}))
    await until(queue, submitted.id, lambda job: job.progress.step > 0)
    suites.delete(suites.get("words").ref)
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert (done.state, done.attempts) == (JobState.FAILED, 1)
    assert "suite version words@1 does not exist" in (done.reason or "")
    assert registry.names() == []
