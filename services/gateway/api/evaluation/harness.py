"""/v1/evaluations in lm-evaluation-harness' form: results are given in it, and what the harness wrote is imported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Depends, Query

from services.common.errors import InvalidRequest, NotFound
from services.common.evaluation.runs.harness import (
    HARNESS,
    HarnessTask,
    exported_results,
    exported_sample,
    read_task,
    task_names,
)
from services.common.evaluation.runs.records import Imported, RunRecord, RunSuite, RunTarget
from services.common.evaluation.runs.results import result_of
from services.common.evaluation.suites.names import parse_suite_ref
from services.common.queue.records import new_job_id
from services.common.validation.json_text import parsed_json
from services.gateway.api.base.idempotency import Once
from services.gateway.api.base.routing import Routes
from services.gateway.api.evaluation.runs import ItemPage, RunPath, begun_run, place_of
from services.gateway.api.evaluation.services import Evaluation, EvaluationServices
from services.gateway.auth.caller import owner
from services.gateway.auth.route_permissions import TRAIN_OR_ADMIN, Permission
from services.gateway.protocol.evaluation.harness import HarnessImport, HarnessSamples
from services.gateway.protocol.evaluation.runs import EvaluationObject

routes = Routes("evaluation")


@routes.get("/v1/evaluations/{run}/harness", Permission(TRAIN_OR_ADMIN))
async def get_harness_results(
    run: RunPath, evaluation: Evaluation, target: Annotated[str | None, Query(max_length=2300)] = None
) -> dict[str, Any]:
    """The object of lm-evaluation-harness' results_*.json for one target of a run that has ended, by default the first
    one: each suite is a task by its name."""
    record = await _record(evaluation, run)
    result = await evaluation.threads.run(evaluation.runs.result, run)
    if result is None:
        raise NotFound(f"evaluation {run} has no result yet", param="run")
    number = place_of([one.name for one in record.targets], target, "target")
    shots = {}
    for suite in record.suites:
        try:
            manifest = await evaluation.threads.run(evaluation.suites.get, *parse_suite_ref(suite.suite))
        except NotFound:  # the suite was deleted since, and the scores stay
            continue
        shots[suite.suite] = len(manifest.settings.few_shot)
    return exported_results(record, result, record.targets[number].name, shots)


@routes.get("/v1/evaluations/{run}/harness/samples", Permission(TRAIN_OR_ADMIN))
async def list_harness_samples(
    run: RunPath, evaluation: Evaluation, page: Annotated[ItemPage, Depends()]
) -> HarnessSamples:
    """The rows of lm-evaluation-harness' samples_{task}_*.jsonl: of one suite and one target, by default the first
    ones. `after` is the last doc_id of the page before."""
    record = await _record(evaluation, run)
    place, number = page.places(record)
    ref, first, limit = record.suites[place].suite, page.after + 1, page.limit
    manifest = await evaluation.threads.run(evaluation.suites.get, *parse_suite_ref(ref))
    items = await evaluation.threads.run(evaluation.suites.items, manifest, first, limit)
    results = await evaluation.threads.run(evaluation.runs.items, run, place, number, first, limit)
    return HarnessSamples(
        task=task_names(record)[ref],
        data=[exported_sample(items[one.index - first], one) for one in results],
        has_more=len(results) == limit and first + limit < record.suites[place].items,
    )


@routes.post(
    "/v1/evaluations/import",
    Permission(TRAIN_OR_ADMIN, audited=True, idempotent=True),
    status_code=201,
    response_model=EvaluationObject,
)
async def import_harness_results(body: HarnessImport, evaluation: Evaluation, once: Once) -> Any:
    """Keeps what lm-evaluation-harness wrote of one model as an evaluation, which is marked as imported.

    The scores are the harness's, and the intervals are made of them as of ours. Every document counts.
    """

    async def keep() -> EvaluationObject:
        async with evaluation.checks:
            tasks = await asyncio.to_thread(_tasks, body)
        now = time.time()
        record = _imported(body, tasks, now)
        found = {(place, 0): task.items for place, task in enumerate(tasks)}
        result = await asyncio.to_thread(result_of, record, found, now)
        await evaluation.threads.run(evaluation.runs.add_whole, record, found, result)
        return EvaluationObject.of(record.id, None, record, result)

    return await once(keep, body=body)


async def _record(evaluation: EvaluationServices, run: str) -> RunRecord:
    """Record of a run of suites that the caller may see.

    Raises:
        NotFound: there is none, or it has not begun.
        InvalidRequest: it was imported.
    """
    record = await begun_run(evaluation, run)
    if record.imported is not None:
        raise InvalidRequest(f"evaluation {run} was imported: its tasks are no suites of this server", param="run")
    return record


def _tasks(body: HarnessImport) -> list[HarnessTask]:
    """Tasks of a request. Blocking. Raises InvalidRequest."""
    for name in sorted(set(body.metrics) - set(body.samples)):
        raise InvalidRequest(f"metrics: there are no samples of task {name[:80]!r}", param="metrics")
    return [
        read_task(body.results, task, _rows(task, text), body.metrics.get(task)) for task, text in body.samples.items()
    ]


def _rows(task: str, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield parsed_json(line, allow_inf_nan=True)
            except ValueError as error:
                raise InvalidRequest(
                    f"samples.{task[:80]}: line {number} is not JSON: {str(error)[:200]}", param="samples"
                ) from error


def _imported(body: HarnessImport, tasks: list[HarnessTask], now: float) -> RunRecord:
    model = body.results.get("model_name")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("results: they do not name a model (model_name)", param="results")
    suites = [
        RunSuite(
            suite=f"{task.name}@{task.version}" if task.version else task.name,
            digest=task.digest,
            items=len(task.items),
            scorer=task.metric,
            better="higher" if task.higher_is_better else "lower",
            sampling=None,
        )
        for task in tasks
    ]
    config = body.results.get("config")
    seed = config.get("random_seed") if isinstance(config, dict) else None
    return RunRecord(
        id=new_job_id(),
        suites=tuple(suites),
        targets=(RunTarget(name=model),),
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else 0,
        base_digest="",
        metadata=body.metadata,
        key_id=owner(),
        created_at=now,
        imported=Imported(program=HARNESS, model=model, date=str(body.results.get("date") or "")),
    )
