"""/v1/evaluations/compare: targets of several runs in one table."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from services.common.adapters.names import parse_adapter_version
from services.common.errors import InvalidRequest, NotFound
from services.common.evaluation.runs.lists import PAGE
from services.common.evaluation.runs.records import ItemResult
from services.common.evaluation.runs.side_by_side import Entry, labelled, side_by_side
from services.common.jobs.kinds.evaluate import MAX_TARGETS
from services.gateway.api.base.routing import Routes
from services.gateway.api.evaluation.runs import found_run
from services.gateway.api.evaluation.services import Evaluation, EvaluationServices
from services.gateway.auth.caller import owner, sees
from services.gateway.auth.route_permissions import TRAIN_OR_ADMIN, Permission
from services.gateway.protocol.evaluation.side_by_side import ComparisonObject

routes = Routes("evaluation")


@routes.get("/v1/evaluations/compare", Permission(TRAIN_OR_ADMIN))
async def compare_evaluations(
    evaluation: Evaluation,
    of: Annotated[list[Annotated[str, Query(max_length=100)]], Query(min_length=1, max_length=MAX_TARGETS)],
    target: Annotated[list[str] | None, Query(max_length=MAX_TARGETS)] = None,
) -> ComparisonObject:
    """Up to eight targets side by side, on every suite that they answered, each compared with the first one.

    `of` is an evaluation, of which every target counts, or a version `name@n`, of which the newest evaluation that has
    ended does; repeat it. `target` keeps targets of these names only.
    """
    found: list[Entry] = []
    for one in of:
        found += await (_of_version(evaluation, one) if "@" in one else _of_run(evaluation, one))
    if target:
        found = [one for one in found if {one.label, one.record.targets[one.target].name}.intersection(target)]
    if not 1 <= len(found) <= MAX_TARGETS:
        raise InvalidRequest(
            f"{len(found)} targets are asked for, and a table has 1 to {MAX_TARGETS}: name some with target",
            param="target" if target else "of",
        )
    entries = labelled(found)

    def items(entry: Entry, place: int) -> list[ItemResult]:
        count = entry.record.suites[place].items
        return evaluation.runs.items(entry.record.id, place, entry.target, 0, count)

    async with evaluation.checks:
        return ComparisonObject.of(entries, await evaluation.threads.run(side_by_side, entries, items))


async def _of_run(evaluation: EvaluationServices, run: str) -> list[Entry]:
    """All targets of a run. Raises NotFound: it is not there, or has no result."""
    await found_run(evaluation, run)
    record = await evaluation.threads.run(evaluation.runs.record, run)
    result = await evaluation.threads.run(evaluation.runs.result, run)
    if record is None or result is None:
        raise NotFound(f"evaluation {run} has no result yet", param="of")
    return [Entry(record, result, at, known.name) for at, known in enumerate(record.targets)]


async def _of_version(evaluation: EvaluationServices, ref: str) -> list[Entry]:
    """A version in its newest run that has a result. Raises NotFound: it has none, or there is no such version."""
    version = parse_adapter_version(ref)
    manifest = await evaluation.threads.run(evaluation.registry.manifest, version)
    listed = evaluation.runs.of_version(version)
    for run in await evaluation.threads.run(listed.newest, None if sees(None) else owner(), None, PAGE):
        record = await evaluation.threads.run(evaluation.runs.record, run)
        result = await evaluation.threads.run(evaluation.runs.result, run)
        if record is None or result is None:
            continue
        for at, known in enumerate(record.targets):
            if known.name == ref or known.digest == manifest.digest:  # a gate's run knows it as its candidate
                return [Entry(record, result, at, ref)]
    raise NotFound(f"{ref} has no evaluation that has ended: run one with it as a target", param="of")
