"""An evaluation from the queue to its result: real Redis, real S3, the tiny model's engine in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import Unavailable
from services.common.evaluation.runs.records import RunResult
from services.common.evaluation.runs.store import SHARD_ITEMS, EvaluationStore
from services.common.evaluation.suites.lines import read_suite
from services.common.evaluation.suites.manifest import SuiteOrigin
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import EvalJob, Job, JobState, LoraSettings
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.of_texts.exact import TextScorer
from services.common.jobs.scorers.sample import Sample
from services.common.queue.job_queue import JobQueue
from services.common.security.sandbox.sandbox import Sandbox
from services.common.security.sandbox.shut_in import Isolation
from services.common.storage.object_store import ObjectStore
from services.engine.models.lora.trainable import LoraParams
from tests.integration.beside_engine import Start, events, pod, start, until
from tests.missing import sandbox_level
from tests.rollout_support import TINY, Pod
from tests.unit.common.jobs.scorers.test_webhook import serving

__all__ = ["pod", "start"]
SUMS = 70
"""Items of the suite: more than a shard has."""


@pytest.fixture
def suites(store: ObjectStore) -> SuiteStore:
    suites = SuiteStore(store)
    lines = [
        {"prompt": f"What is {number} plus {number + 1}?", "expected": 2 * number + 1, "group": str(number // 2)}
        for number in range(SUMS)
    ]
    made(suites, "sums", lines, scorer={"type": "exact"}, sampling={"max_tokens": 6})
    return suites


def made(suites: SuiteStore, name: str, lines: list[dict[str, Any]], **settings: Any) -> None:
    parsed = SuiteSettings.model_validate(settings)
    suites.create(name, parsed, read_suite("\n".join(map(json.dumps, lines)), parsed))


def published(registry: AdapterRegistry, pod: Pod) -> None:
    """Version toy@1, an adapter that changes nothing."""
    lora = LoraParams.create(pod.host.model.config, LoraSettings(rank=2), device=pod.host.model.device)
    registry.publish("toy", lora.to_files("base"), base_digest=pod.host.base_digest, job_id=None, metrics={})


def job(**fields: Any) -> EvalJob:
    return EvalJob.model_validate({"suites": ["sums"], **fields})


async def ended(queue: JobQueue, spec: EvalJob) -> Job:
    return await until(queue, (await queue.submit(spec, key_id="ci")).id, lambda job: job.state.terminal)


def comparable(result: RunResult | None) -> dict[str, Any]:
    assert result is not None
    return result.model_dump(exclude={"id", "finished_at"})


async def test_from_submit_to_the_result(
    queue: JobQueue, store: ObjectStore, registry: AdapterRegistry, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    published(registry, pod)
    colours = [{"prompt": f"{n}: red or blue?", "choices": ["red", "blue"], "expected": "blue"} for n in range(3)]
    made(suites, "colours", colours, scorer={"type": "choice", "by": "text"})
    made(
        suites, "texts", [{"prompt": "1, 2,", "expected": " 3"}] * 2, scorer={"type": "perplexity"}, prompt_format="raw"
    )
    start()
    spec = job(suites=["sums", "colours@1", "texts"], targets=["base", "toy"], metadata={"by": "test"})
    done = await ended(queue, spec)
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, None), done.reason
    assert done.progress.step == done.progress.total_steps == 2 * (SUMS + 3 + 2)
    said = [event.data for event in await events(queue, done.id) if event.kind == "eval"]
    assert [(one["suite"], one["target"]) for one in said[:2]] == [("sums@1", "base"), ("sums@1", "toy@1")]
    runs = EvaluationStore(store)
    record, result = runs.record(done.id), runs.result(done.id)
    assert record is not None
    assert result is not None
    assert (record.key_id, record.metadata, record.targets[1].name) == ("ci", {"by": "test"}, "toy@1")
    first = result.summaries[0]
    assert (first.items, first.clusters, first.answers, first.invalid) == (SUMS, SUMS // 2, SUMS, 0)
    assert first.mean > 0.5, "the tiny model knows small sums"
    assert first.interval is not None
    assert 0 < first.interval.low < first.mean <= first.interval.high
    texts = result.summaries[-1]
    assert texts.perplexity is not None
    assert texts.perplexity > 1
    # An adapter that changes nothing is no better and no worse.
    assert [(one.gain, one.p) for one in result.comparisons] == [(0.0, 1.0)] * 3
    found = runs.items(done.id, 0, 1, SHARD_ITEMS - 1, 2)
    assert [one.item for one in found] == [str(SHARD_ITEMS), str(SHARD_ITEMS + 1)]
    assert found[0].answers[0].finish_reason == "stop"
    assert runs.items(done.id, 1, 0, 0, 1)[0].answers[0].logprobs is not None
    assert runs.of_version(AdapterVersion("toy", 1)).newest() == runs.all.newest("ci") == [done.id]


async def test_adapters_together_are_a_target(
    queue: JobQueue, store: ObjectStore, registry: AdapterRegistry, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    published(registry, pod)
    published(registry, pod)
    made(
        suites,
        "few",
        [{"prompt": "What is 3 plus 4?", "expected": 7}],
        scorer={"type": "exact"},
        sampling={"max_tokens": 16},
    )
    item = [{"prompt": "What is 3 plus 4?", "expected": 7}]
    verdicts = {"10": 0.5, "9": 0.25}
    asked = "What is 3 plus {answer}?"
    judge = {"type": "judge", "judge": "toy@1*0.5+toy@2", "prompt": asked, "verdicts": verdicts}
    made(suites, "judged", item, scorer=judge, sampling={"max_tokens": 16})
    start()
    done = await ended(queue, job(suites=["few", "judged"], targets=["toy*0.5", "toy@2+toy@1*-1", "toy"]))
    assert done.state is JobState.SUCCEEDED, done.reason
    runs = EvaluationStore(store)
    record = runs.record(done.id)
    assert record is not None
    assert [target.name for target in record.targets] == ["toy@2*0.5", "toy@1*-1+toy@2", "toy@2"]
    assert len({target.digest for target in record.targets}) == 3
    (seen,) = runs.items(done.id, 1, 0, 0, 1)
    assert seen.score == pytest.approx(0.5, abs=0.05), "several adapters read the answer"
    assert runs.of_version(AdapterVersion("toy", 1)).newest() == [done.id]


async def test_a_run_that_is_handed_on_ends_in_the_result_of_one_that_is_not(
    queue: JobQueue, store: ObjectStore, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    colours = [{"prompt": f"{n}: red or blue?", "expected": "blue"} for n in range(2)]
    made(suites, "colours", colours, scorer={"type": "exact"}, sampling={"max_tokens": 6})
    spec = job(suites=["colours", "sums"], sampling={"samples": 3, "temperature": 1.5}, seed=7)
    first = start()
    submitted = await queue.submit(spec)
    await until(queue, submitted.id, lambda job: job.progress.step >= len(colours) + SHARD_ITEMS)
    assert await asyncio.to_thread(first.drain)
    runs = EvaluationStore(store)
    kept = runs.shard(submitted.id, 1, 0, 0)
    assert kept is not None
    start()
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert runs.shard(done.id, 1, 0, 0) == kept
    undisturbed = await ended(queue, spec)
    assert comparable(runs.result(done.id)) == comparable(runs.result(undisturbed.id))
    told = [event.data["suite"] for event in await events(queue, done.id) if event.kind == "eval"]
    assert told == ["colours@1", "sums@1"], "once each"
    answers = {answer.text for item in runs.items(done.id, 1, 0, 0, SUMS) for answer in item.answers}
    assert len(answers) > 10, "samples differ"


@pytest.mark.thorough
async def test_what_is_deleted_meanwhile_fails_the_run_by_name_and_keeps_what_was_answered(
    queue: JobQueue, store: ObjectStore, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    start()
    done = await ended(queue, job(targets=["base", "gone@3"]))
    assert done.state is JobState.FAILED
    assert "gone@3" in (done.reason or "")
    submitted = await queue.submit(job(sampling={"samples": 3, "temperature": 1.0}))
    await until(queue, submitted.id, lambda job: job.progress.total_steps > 0)
    suites.delete(suites.get("sums").ref)
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert (done.state, done.attempts) == (JobState.FAILED, 1)
    assert "suite version sums@1 does not exist" in (done.reason or "")
    assert EvaluationStore(store).record(done.id) is not None


async def test_answers_to_the_erased_are_not_kept_by_a_run_that_asks_them_now(
    queue: JobQueue, store: ObjectStore, suites: SuiteStore, start: Start, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [
        SuiteItem(id=str(n), prompt=f"{n} + 1?", expected=[str(n + 1)], marks=["ann"] * (n == 3)) for n in range(5)
    ]
    origin = SuiteOrigin(sha256="0" * 64, rows=5, dataset="thumbs@1")
    settings = SuiteSettings.model_validate({"scorer": {"type": "exact"}})
    suites.create("theirs", settings, items, origin=origin)
    scored, runs = TextScorer.score, EvaluationStore(store)

    def erased_meanwhile(self: TextScorer, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        assert suites.erase("ann", runs.erase) == {"theirs@1": 1}
        return scored(self, samples, interrupt)

    monkeypatch.setattr(TextScorer, "score", erased_meanwhile)
    start()
    done = await ended(queue, job(suites=["theirs"]))
    assert (done.state, done.attempts) == (JobState.FAILED, 1)
    assert "suite version theirs@1 does not exist" in (done.reason or "")
    assert runs.record(done.id) is not None
    assert runs.items(done.id, 0, 0, 0, 5) == []


@pytest.mark.thorough
async def test_a_store_and_a_scorer_that_fail_lose_no_answers(
    queue: JobQueue, store: ObjectStore, suites: SuiteStore, start: Start, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, scored = store.put, TextScorer.score
    failures = iter([Unavailable("no space is left")] * 2)

    def full(key: str, data: bytes, **options: Any) -> Any:
        if "/00-00/" in key and (error := next(failures, None)) is not None:
            raise error
        return put(key, data, **options)

    monkeypatch.setattr(store, "put", full)
    start()
    done = await ended(queue, job())
    assert (done.state, done.attempts) == (JobState.SUCCEEDED, 1), done.reason
    assert next(failures, None) is None, "the store failed"

    def broken(self: TextScorer, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        if len(samples) < SHARD_ITEMS:
            raise RuntimeError("the scorer broke")
        return scored(self, samples, interrupt)

    monkeypatch.setattr(TextScorer, "score", broken)
    failed = await ended(queue, job(seed=1))
    assert (failed.state, "the scorer broke" in (failed.reason or "")) == (JobState.FAILED, True), failed.reason
    runs = EvaluationStore(store)
    assert len(runs.items(failed.id, 0, 0, 0, SUMS)) == SHARD_ITEMS, "what was scored before stays"
    assert runs.result(failed.id) is None


async def test_a_run_is_cancelled_in_the_middle_of_its_answers(
    queue: JobQueue, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    worker = start()
    submitted = await queue.submit(job(sampling={"samples": 64, "temperature": 1.0}))
    await until(queue, submitted.id, lambda job: job.progress.total_steps > 0)
    await queue.cancel(submitted.id)
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert done.state is JobState.CANCELLED
    assert done.progress.step < done.progress.total_steps
    assert worker.alive


async def test_a_judge_that_talks_nonsense_counts_as_invalid(
    queue: JobQueue, store: ObjectStore, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    lines = [{"prompt": f"Say {number}", "expected": str(number)} for number in range(4)]
    verdicts = {"qzx": 1.0, "zqv": 0.0}
    made(suites, "judged", lines, scorer={"type": "judge", "verdicts": verdicts}, sampling={"max_tokens": 4})
    too_long = [{"prompt": "word " * 400, "expected": "1"}, {"prompt": "What is 1 plus 1?", "expected": "2"}]
    made(suites, "long", too_long, scorer={"type": "exact"}, sampling={"max_tokens": 4})
    start()
    done = await ended(queue, job(suites=["judged", "long"]))
    assert done.state is JobState.SUCCEEDED, done.reason
    result = EvaluationStore(store).result(done.id)
    assert result is not None
    judged, long = result.summaries
    assert (judged.mean, judged.invalid, judged.items) == (0.0, 4, 4)
    assert (long.invalid, long.items) == (1, 2), "what does not fit is an invalid answer, not left out"
    assert long.mean <= 0.5
    found = EvaluationStore(store).items(done.id, 1, 0, 0, 1)[0].answers[0]
    assert (found.valid, found.finish_reason) == (False, "error")
    assert "context" in (found.reason or "")


async def test_calls_of_tools_are_read_as_the_gateway_reads_them(
    queue: JobQueue, store: ObjectStore, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    settings = json.loads((TINY / "suites" / "tools.json").read_text())
    lines = [json.loads(line) for line in (TINY / "suites" / "tools.jsonl").read_text().splitlines()[:8]]
    made(suites, "tools", lines, **settings | {"sampling": {"max_tokens": 48}})
    start()
    done = await ended(queue, job(suites=["tools"]))
    assert done.state is JobState.SUCCEEDED, done.reason
    found = EvaluationStore(store).items(done.id, 0, 0, 0, 8)
    fitting = [one for one in found if one.answers[0].finish_reason != "error"]  # the pod's context is short
    right = [one for one in fitting if one.score == 1]
    assert len(right) == len(fitting) >= 4, [one.answers for one in found if one.score < 1]
    assert {answer.finish_reason for one in right for answer in one.answers} == {"tool_calls"}
    wanted = lines[right[0].index]["expected_tool_calls"]
    assert [json.loads(call) for call in right[0].answers[0].tool_calls] == wanted


async def test_programs_of_answers_run_with_their_tests(
    queue: JobQueue, store: ObjectStore, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    sandbox = Sandbox(Isolation.NAMESPACES)
    with sandbox_level():
        sandbox.check()
    lines: list[dict[str, Any]] = [
        {"prompt": f"What is {number} plus 1?", "tests": {"prelude": "x = ", "code": f"assert x == {number + 1}"}}
        for number in range(6)
    ]
    lines.append({"prompt": "What is 1 plus 1?", "tests": {"prelude": "raise SystemExit(0)\n", "code": "pass"}})
    sampling = {"max_tokens": 6, "samples": 2, "temperature": 0.1, "score": "pass", "k": 1}
    made(suites, "programs", lines, scorer={"type": "python_tests"}, sampling=sampling)
    without = start()
    refused = await ended(queue, job(suites=["programs"]))
    assert (refused.state, "TEMPER_SANDBOX" in (refused.reason or "")) == (JobState.FAILED, True)
    assert await asyncio.to_thread(without.drain)
    start(grants=Grants(sandbox=sandbox))
    done = await ended(queue, job(suites=["programs"]))
    assert done.state is JobState.SUCCEEDED, done.reason
    found = EvaluationStore(store).result(done.id)
    items = EvaluationStore(store).items(done.id, 0, 0, 0, 7)
    assert items[-1].score == 0, "to end is not to pass"
    assert sum(one.score for one in items) >= 4
    assert found is not None
    assert found.summaries[0].mean == pytest.approx(sum(one.score for one in items) / 7)


@pytest.mark.thorough
async def test_another_server_is_compared_with(
    queue: JobQueue, store: ObjectStore, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    busy = iter([(429, {}, b"busy")])

    def answer(seen: Any) -> Any:
        if (first := next(busy, None)) is not None:
            return first
        if b"What is 9 plus" in seen.body:  # by what is asked: items come in no fixed order
            return 400, {}, b"too long"
        message = {"role": "assistant", "content": "7"}
        body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        return 200, {}, json.dumps(body).encode()

    with serving(answer) as server:
        start(grants=Grants(Webhooks(allowed=(server.url,))))
        done = await ended(queue, job(targets=["base", {"url": f"{server.url}/v1", "model": "seven"}]))
        refused = await ended(queue, job(targets=[{"url": "http://169.254.169.254/v1", "model": "seven"}]))
    assert done.state is JobState.SUCCEEDED, done.reason
    result = EvaluationStore(store).result(done.id)
    assert result is not None
    other = result.summaries[1]
    assert (other.items, other.invalid, other.mean) == (SUMS, 1, 1 / SUMS)
    (pair,) = result.comparisons
    assert pair.gain < -0.9
    assert pair.p < 1e-6
    assert (refused.state, refused.attempts) == (JobState.FAILED, 1)
    assert "not covered by TEMPER_REWARD_WEBHOOKS" in (refused.reason or "")
