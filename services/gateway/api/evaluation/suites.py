"""/v1/eval/suites: making, reading and removing versions of suites.

Suites are everybody's to read and run who may train. A name belongs to the API key that first used it: only that one,
and administrators, make further versions of it and remove them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query

from services.common.errors import NotFound, Unavailable
from services.common.evaluation.suites.lines import read_suite
from services.common.evaluation.suites.manifest import SuiteManifest, SuiteOrigin
from services.common.evaluation.suites.names import SuiteName, SuiteVersion, parse_suite_ref
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.evaluation.suites.split import held_out_items
from services.common.storage.names import REF_SCHEMA
from services.common.storage.record_versions import passing_over
from services.gateway.api.base.idempotency import Once
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.evaluation.services import Evaluation, EvaluationServices
from services.gateway.api.training.datasets import readable
from services.gateway.auth.caller import check_name_owner, owner
from services.gateway.auth.route_permissions import TRAIN_OR_ADMIN, Permission
from services.gateway.protocol.evaluation.suites import (
    DeletedSuite,
    SuiteItemList,
    SuiteItemObject,
    SuiteList,
    SuiteObject,
    SuitePath,
    SuiteRequest,
)
from services.learning.datasets.store import DatasetManifest, DatasetStore
from services.learning.datasets.suite_items import suite_items

routes = Routes("evaluation")


@routes.post(
    "/v1/eval/suites",
    Permission(TRAIN_OR_ADMIN, audited=True, idempotent=True),
    status_code=201,
    response_model=SuiteObject,
)
async def create_suite(body: SuiteRequest, evaluation: Evaluation, once: Once) -> Any:
    """Makes a version of a suite, or returns the newest one if it has the same content.

    Every line is checked; malformed ones are named by number and field, and nothing is made.
    """

    async def create() -> SuiteObject:
        settings = body.settings
        source = None if body.dataset is None else await readable(evaluation.datasets, evaluation.threads, body.dataset)
        async with evaluation.checks:
            if source is None:
                items, origin = await asyncio.to_thread(_read, body.jsonl or "", body, settings)
            else:
                items, origin = await evaluation.threads.run(_held_out, evaluation.datasets, source, settings)
        key_id = await _name_owner(evaluation, body.name)
        made = await evaluation.threads.run(
            evaluation.suites.create, body.name, settings, items, origin=origin, key_id=key_id
        )
        if source is not None and (await _found_again(evaluation, source)) != source.digest:
            await evaluation.threads.run(evaluation.suites.delete, made.ref)
            raise Unavailable(f"somebody was erased from {source.ref} meanwhile; retry", retry_after=1.0)
        return SuiteObject.of(made)

    return await once(create, body=body)


def _read(jsonl: str, body: SuiteRequest, settings: SuiteSettings) -> tuple[list[SuiteItem], SuiteOrigin | None]:
    """Items of a request, checked. Blocking. Raises InvalidRequest."""
    origin = None
    if body.split is None:
        items = read_suite(jsonl, settings)
    else:
        items = held_out_items(jsonl, body.split, settings)
        rows = sum(bool(line.strip()) for line in jsonl.split("\n"))
        origin = SuiteOrigin(sha256=hashlib.sha256(jsonl.encode()).hexdigest(), rows=rows, split=body.split)
    _check_answers(items, settings)
    return items, origin


async def _found_again(evaluation: EvaluationServices, source: DatasetManifest) -> str:
    """Digest of a data set by now; empty: it is gone."""
    try:
        return (await evaluation.threads.run(evaluation.datasets.get, source.name, source.version)).digest
    except NotFound:
        return ""


def _held_out(
    datasets: DatasetStore, source: DatasetManifest, settings: SuiteSettings
) -> tuple[list[SuiteItem], SuiteOrigin]:
    """Items of a data set's held-out rows. Blocking. Raises InvalidRequest."""
    items = suite_items(source.ref, datasets.rows(source, "held_out"), source.spec.split, settings)
    _check_answers(items, settings)
    return items, SuiteOrigin(sha256=source.digest, rows=source.rows["held_out"], dataset=source.ref)


def _check_answers(items: Sequence[SuiteItem], settings: SuiteSettings) -> None:
    answers = [(f"item {item.id[:80]!r}: expected", answer) for item in items for answer in item.expected or ()]
    settings.scorer.check("scorer", answers)


async def _name_owner(evaluation: EvaluationServices, name: str) -> str:
    """Id of the API key that the name belongs to: the caller's if nobody has used it.

    Raises:
        Forbidden: it belongs to another one, and the caller is no administrator.
    """
    try:
        newest = await evaluation.threads.run(evaluation.suites.get, name)
    except NotFound:
        return owner()
    check_name_owner("suite", name, newest.key_id)
    return newest.key_id


@routes.get("/v1/eval/suites", Permission(TRAIN_OR_ADMIN))
async def list_suites(
    evaluation: Evaluation,
    name: SuiteName | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(json_schema_extra=dict(REF_SCHEMA))] = None,
) -> SuiteList:
    """The newest version of each suite by name, or every version of the suite `name`.

    `after` is the last id of the page before.
    """
    if name is None:
        found = await evaluation.threads.run(evaluation.suites.newest)
    else:
        numbers = await evaluation.threads.run(evaluation.suites.versions, name)
        found = [SuiteVersion(name, number) for number in numbers]
    if after is not None:
        last, number = parse_suite_ref(after)
        found = [one for one in found if one.name > last or (name is not None and one.version > (number or 0))]
    unreadable, read = Unreadable(own=True), []  # suites are everybody's
    for version in found[:limit]:
        with passing_over(unreadable, str(version), None):
            read.append(await _manifest(evaluation, version))
    data = [SuiteObject.of(manifest) for manifest in read if manifest is not None]
    return SuiteList(data=data, has_more=len(found) > limit, unreadable=unreadable)


async def _manifest(evaluation: EvaluationServices, version: SuiteVersion) -> SuiteManifest | None:
    try:
        return await evaluation.threads.run(evaluation.suites.get, version.name, version.version)
    except NotFound:  # deleted since
        return None


async def _picked(evaluation: EvaluationServices, suite: str) -> SuiteManifest:
    return await evaluation.threads.run(evaluation.suites.get, *parse_suite_ref(suite))


@routes.get("/v1/eval/suites/{suite}", Permission(TRAIN_OR_ADMIN))
async def get_suite(suite: SuitePath, evaluation: Evaluation) -> SuiteObject:
    """A version: `name@n`, or the newest one of `name`."""
    return SuiteObject.of(await _picked(evaluation, suite))


@routes.get("/v1/eval/suites/{suite}/items", Permission(TRAIN_OR_ADMIN))
async def list_items(
    suite: SuitePath,
    evaluation: Evaluation,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int, Query(ge=-1, lt=2**53)] = -1,
) -> SuiteItemList:
    """Items of a version in their order. `after` is the last index of the page before."""
    manifest = await _picked(evaluation, suite)
    items = await evaluation.threads.run(evaluation.suites.items, manifest, after + 1, limit)
    data = [SuiteItemObject(**dict(item), index=index) for index, item in enumerate(items, start=after + 1)]
    return SuiteItemList(
        suite=str(manifest.ref), data=data, total=manifest.items, has_more=after + 1 + len(items) < manifest.items
    )


@routes.delete(
    "/v1/eval/suites/{suite}",
    Permission(TRAIN_OR_ADMIN, audited=True, idempotent=True),
    response_model=DeletedSuite,
)
async def delete_suite(suite: SuitePath, evaluation: Evaluation, once: Once) -> Any:
    """Removes a version, `name@n`, or all versions of `name`. Their numbers are not used again."""

    async def delete() -> DeletedSuite:
        manifest = await _picked(evaluation, suite)
        await _name_owner(evaluation, manifest.name)
        _, number = parse_suite_ref(suite)
        versions = evaluation.suites.versions
        numbers = await evaluation.threads.run(versions, manifest.name) if number is None else [number]
        for one in numbers:
            await evaluation.threads.run(evaluation.suites.delete, SuiteVersion(manifest.name, one))
        return DeletedSuite(id=suite, versions=numbers)

    return await once(delete)
