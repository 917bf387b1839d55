"""Dry runs of every kind of job, from the queue to the report: real Redis, real S3, the tiny model's engine in this
process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.training.environments.serving import serving
from models.tiny.recipe.data import held_out_items
from services.common.adapters.registry import AdapterRegistry
from services.common.jobs import JOBS, Job, JobState, TrainingSpec
from services.common.jobs.dry_runs.report import DryRunReport
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.grants import Grants
from services.common.queue.job_queue import JobQueue
from services.common.storage.object_store import ObjectStore
from services.environments.guess import Guess
from tests.integration.beside_engine import Start, start, until
from tests.integration.test_rollout_job import trainer_fields
from tests.rollout_support import TINY, Pod, running_pod
from tests.training_support import TrainingHost, random_adapter

__all__ = ["start", "trainer_fields"]

KNOWN = [(item.messages[-1]["content"], item.answer) for item in held_out_items("arithmetic", 8)]
PAIR = {"prompt": "Say 1", "chosen": "one", "rejected": "Nobody would ever say that."}
PROMPTS = [f"Say {n}" for n in range(6)]
FIELDS: dict[str, dict[str, Any]] = {
    "sft": {
        "examples": [{"prompt": asked, "completion": f"It is {said}."} for asked, said in KNOWN],
        "eval_fraction": 0.25,
    },
    "dpo": {"examples": [PAIR, {**PAIR, "prompt": "Say 2"}]},
    "kto": {"examples": [{"prompt": f"Say {n}", "completion": "one", "label": n % 2 == 0} for n in range(4)]},
    "grpo": {
        "groups": [
            {"prompt": "Say 1", "completions": [{"text": "1", "reward": 1}, {"text": "2", "reward": 0}]},
            {"prompt": "Say 2", "completions": [{"text": "1", "reward": 0}, {"text": "2", "reward": 0}]},
        ]
    },
    "opd": {"teacher": "tutor@1", "prompts": PROMPTS, "rounds": 3, "max_tokens": 8},
    "draft": {"adapter": "drafter", "examples": [{"prompt": asked, "completion": said * 4} for asked, said in KNOWN]},
}


@pytest.fixture
def pod(registry: AdapterRegistry) -> Iterator[Pod]:
    with running_pod(registry=registry, speculative="mtp", drafter="drafter") as pod:
        yield pod
        pod.settle()


def dry(kind: str, **fields: Any) -> TrainingSpec:
    own = {"adapter": "subject", "lora": {"rank": 4}} if kind != "draft" else {}
    return JOBS[kind].model_validate({**own, "dry_run": True, "attach": False, **FIELDS[kind], **fields})


async def reported(queue: JobQueue, spec: TrainingSpec) -> tuple[Job, DryRunReport]:
    done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert done.report is not None
    return done, done.report


async def test_every_kind_is_tried_and_nothing_of_it_stays(
    queue: JobQueue, store: ObjectStore, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    tutor = random_adapter(TrainingHost(TINY), scale=0.3)
    registry.publish("tutor", tutor, base_digest=pod.engine.base_digest)
    before = set(store.list(""))
    start()
    found = {}
    for kind in JOBS:
        done, found[kind] = await reported(queue, dry(kind))
        assert (done.dry_run, done.result_adapter) == (True, None)
        report = found[kind]
        assert report.time.seconds > 0
        assert report.time.steps == done.settings["steps"]
        assert 0 < report.memory.needed <= report.memory.available
        assert report.counts.kept > 0
        assert report.counts.tokens > report.counts.trained_tokens > 0
        for shown in report.samples:
            assert {span.trained for span in shown.spans} == {True, False}
    assert set(store.list("")) == before
    assert registry.names() == ["tutor"]
    assert not await queue.list(limit=1, state=JobState.QUEUED)

    sft = found["sft"]
    assert (sft.counts.unit, sft.counts.given, sft.counts.held_out) == ("example", 6, 2)
    text = [span.text for span in sft.samples[0].spans if span.trained]
    assert text[0].startswith("It is ")
    assert text[0].endswith("<|im_end|>")
    assert len(text) == 1
    assert sft.saturation is not None
    assert 0 < sft.saturation.share < 1
    assert sft.capacity is not None
    assert sft.capacity.capacity_bits == 2 * sft.capacity.parameters

    assert found["dpo"].saturation is not None
    assert found["dpo"].saturation.share == 1
    assert any("right in 100%" in warning for warning in found["dpo"].warnings)
    grpo = found["grpo"]
    assert grpo.rewards is not None
    assert [(group.mean, group.std) for group in grpo.rewards.by_group] == [(0.5, 0.5), (0, 0)]
    assert (grpo.counts.given, grpo.counts.dropped, grpo.rewards.groups_skipped) == (2, 1, 1)
    assert any("2 completions" in warning for warning in grpo.warnings)
    assert any("1 of 2 groups" in warning for warning in grpo.warnings)
    assert (found["opd"].counts.given, found["opd"].counts.kept) == (6, 4)
    assert found["draft"].capacity is None


async def test_a_job_that_samples_is_tried_on_a_few_prompts(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    start()
    generate = {
        "prompts": PROMPTS,
        "rounds": 1000,
        "completions": 4,
        "max_tokens": 10,
        "temperature": 3.0,
        "reward": [{"type": "regex", "pattern": pattern} for pattern in ("e", "a", "[0-9]", "T")],
        "eval_prompts": ["Say 9"],
    }
    done, report = await reported(queue, dry("grpo", groups=None, generate=generate, epochs=100))
    assert report.rewards is not None
    assert report.rewards.groups == 4
    assert report.rewards.std > 0
    assert {group.completions for group in report.rewards.by_group} == {4}
    assert (report.counts.unit, report.counts.given, report.time.steps) == ("prompt", 6, 100_000)
    # Each round is trained on a hundred times, and of its six prompts four were.
    assert report.time.seconds > 1000 * 100 * done.metrics["train_seconds"]
    assert report.capacity is not None
    assert report.capacity.data_bits == 1000 * 6 * 4
    assert registry.names() == []


async def test_an_environment_is_played_in_once(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    with serving(Guess) as url:
        start(grants=Grants(Webhooks(allowed=(url,))))
        generate = {
            "prompts": [{"prompt": "{observation}", "reset": {"lowest": lowest}} for lowest in range(1, 7)],
            "rounds": 100,
            "completions": 4,
            "max_tokens": 4,
            "temperature": 3.0,
            "reward": [
                {"type": "environment", "url": url, "max_turns": 2, "max_trajectory_tokens": 128},
                *({"type": "regex", "pattern": digit} for digit in "24678"),
            ],
        }
        done, report = await reported(queue, dry("grpo", groups=None, generate=generate))
    assert report.rewards is not None
    assert {group.completions for group in report.rewards.by_group} == {4}
    assert (report.counts.unit, report.counts.given, report.time.steps) == ("prompt", 6, 100)
    assert done.metrics["environment_turns"] >= 1
    assert registry.names() == []


async def test_a_dry_run_fails_by_what_the_job_would_fail_by(queue: JobQueue, start: Start, pod: Pod) -> None:
    start()
    spec = dry("sft", start_from="nobody@3")
    reasons = []
    for one in (spec, spec.model_copy(update={"dry_run": None})):
        done = await until(queue, (await queue.submit(one)).id, lambda job: job.state.terminal)
        assert (done.state, done.report) == (JobState.FAILED, None)
        reasons.append(done.reason)
    assert reasons[0] == reasons[1]
