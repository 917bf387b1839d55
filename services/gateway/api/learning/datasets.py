"""/v1/datasets: versions of data sets, made of feedback, the request log and files; and the erasure of a user.

A data set is made of what its caller may see. A name belongs to the API key that first used it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Path, Query, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from services.common.errors import Conflict, NewerSchema, NotFound
from services.common.security.api_keys import ANONYMOUS
from services.common.storage.names import REF_SCHEMA
from services.common.storage.record_versions import PassOver
from services.common.validation.json_text import parsed_json
from services.gateway.api.base.idempotency import Once
from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.learning.erasure import Erasure
from services.gateway.auth.caller import check_name_owner, owner, sees
from services.gateway.auth.route_permissions import ADMIN, INFERENCE, TRAIN, TRAIN_OR_ADMIN, Permission
from services.gateway.core.file_store import FileStore, StoreThreads
from services.gateway.protocol.learning.datasets import (
    DatasetList,
    DatasetObject,
    DatasetPath,
    DatasetRequest,
    DatasetRows,
    DeletedDataset,
    ErasedUser,
)
from services.learning.datasets.build import Built
from services.learning.datasets.convert import ExampleKind, examples_of
from services.learning.datasets.maker import DatasetMaker
from services.learning.datasets.spec import DatasetName, DatasetSpec, Split
from services.learning.datasets.store import DatasetManifest, DatasetStore, NewDataset, parse_dataset_ref
from services.learning.feedback.record import FeedbackRecord
from services.learning.feedback.store import FeedbackFilter, FeedbackStore
from services.learning.request_log.index import user_mark
from services.learning.request_log.log import RequestLog

routes = Routes("data sets")
_BUILDS = 2


@dataclass(frozen=True, slots=True)
class DatasetServices:
    """What data sets are made of and kept in. All but the feedback blocks, and so is called in ``threads``."""

    maker: DatasetMaker
    feedback: FeedbackStore
    files: FileStore
    erasure: Erasure
    threads: StoreThreads
    builds: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_BUILDS))
    """Semaphore held while rows are joined, which takes long and much memory."""

    @property
    def store(self) -> DatasetStore:
        return self.maker.store

    @property
    def log(self) -> RequestLog:
        return self.maker.log


Services = Annotated[DatasetServices, provided(DatasetServices)]


@routes.post(
    "/v1/datasets",
    Permission(TRAIN_OR_ADMIN, audited=True, idempotent=True),
    status_code=201,
    response_model=DatasetObject,
)
async def create_dataset(body: DatasetRequest, services: Services, once: Once) -> Any:
    """Makes a version of a data set, or returns the newest one if it has the same rows."""

    async def create() -> DatasetObject:
        mine = None if sees(None) else owner()
        new = NewDataset(body.name, body.spec, await name_owner(services, body.name))
        for place, mixed in enumerate(body.mix):
            for ref in mixed.datasets:
                await check_readable(services, ref, f"mix[{place}].datasets")
        sources = Sources(owner(), mine)
        if not body.dry_run:
            return DatasetObject.of(await made(services, new, sources))
        built, digests = await built_only(services, body.spec, sources)
        rows = {split: len(found) for split, found in built.rows.items()}
        nothing: dict[str, Any] = dict.fromkeys(("id", "version", "digest", "created_at"))
        return DatasetObject(
            **nothing, name=body.name, spec=body.spec, report=built.report, rows=rows, files=digests, recuts=[]
        )

    return await once(create, body=body)


@dataclass(frozen=True, slots=True)
class Sources:
    """What a data set may be made of: the files of an API key, and the feedback and requests of one (None: of
    everybody)."""

    files_of: str
    traffic_of: str | None


async def made(services: DatasetServices, new: NewDataset, sources: Sources) -> DatasetManifest:
    """Makes a version, and marks the feedback that is in it. See DatasetMaker.make; NotFound: a file is not there."""
    async with services.builds:
        opinions, digests, files = await _read(services, new.spec, sources)
        new = replace(new, files=digests)
        manifest, used = await asyncio.to_thread(services.maker.make, new, opinions, files, sources.traffic_of)
    await services.feedback.mark_used(used, manifest.ref)
    return manifest


async def built_only(services: DatasetServices, spec: DatasetSpec, sources: Sources) -> tuple[Built, Mapping[str, str]]:
    """What a version would have, and the digests of its files; nothing is written."""
    async with services.builds:
        opinions, digests, files = await _read(services, spec, sources)
        return await asyncio.to_thread(services.maker.build, spec, opinions, files, sources.traffic_of), digests


async def _read(
    services: DatasetServices, spec: DatasetSpec, sources: Sources
) -> tuple[list[FeedbackRecord], Mapping[str, str], Mapping[str, list[Any]]]:
    opinions = []
    if spec.feedback:
        opinions = [one async for one in services.feedback.each(FeedbackFilter(sources.traffic_of))]
    digests, files = await services.threads.run(
        _read_files, services.files, sources.files_of or ANONYMOUS, spec.files or ()
    )
    return opinions, digests, files


def _read_files(files: FileStore, key_id: str, ids: Sequence[str]) -> tuple[dict[str, str], Mapping[str, list[Any]]]:
    """Digests and lines of a key's files; a line that is no object is told as a faulty one. Blocking, in a thread that
    does not know the caller."""
    digests, found = {}, {}
    for file_id in ids:
        info = files.get(key_id, file_id)
        content = b"".join(files.piece(key_id, info, number) for number in range(info.pieces))
        digests[file_id] = hashlib.sha256(content).hexdigest()
        found[file_id] = list(_lines(content))
    return digests, found


def _lines(content: bytes) -> Iterator[Any]:
    for line in content.split(b"\n"):
        if line.strip():
            try:
                value = parsed_json(line, allow_inf_nan=True)
            except ValueError:
                value = None
            yield value if isinstance(value, dict) else {}


async def name_owner(services: DatasetServices, name: str) -> str:
    """Id of the API key that the name belongs to: the caller's if nobody has used it. Raises Forbidden."""
    try:
        newest = await services.threads.run(services.store.get, name)
    except NotFound:
        return owner()
    check_name_owner("dataset", name, newest.key_id)
    return newest.key_id


@routes.get("/v1/datasets", Permission(TRAIN_OR_ADMIN))
async def list_datasets(
    services: Services,
    name: DatasetName | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(json_schema_extra=dict(REF_SCHEMA))] = None,
) -> DatasetList:
    """The newest version of each data set by name, or every version of the data set `name`. `after` is the last id of
    the page before."""
    if name is None:
        found = await services.threads.run(services.store.newest)
    else:
        found = [(name, number) for number in await services.threads.run(services.store.versions, name)]
    if after is not None:
        last, number = parse_dataset_ref(after)
        found = [one for one in found if one[0] > last or (name is not None and one[1] > (number or 0))]
    unreadable = Unreadable()
    read = [await _found(services, *one, unreadable) for one in found]
    shown = [one for one in read if one is not None and sees(one.key_id)]
    data = [DatasetObject.of(one) for one in shown[:limit]]
    return DatasetList(data=data, has_more=len(shown) > limit, unreadable=unreadable)


async def _found(services: DatasetServices, name: str, number: int, pass_over: PassOver) -> DatasetManifest | None:
    try:
        return await services.threads.run(services.store.get, name, number)
    except NotFound:  # deleted since
        return None
    except NewerSchema as error:
        pass_over(f"{name}@{number}", await services.threads.run(services.store.key_id, name, number), error)
        return None


async def check_readable(services: DatasetServices, ref: str, param: str) -> None:
    """Raises NotFound unless the caller may read the data set that a field names."""
    try:
        await _own(services, ref)
    except NotFound as error:
        error.param = param
        raise


async def _own(services: DatasetServices, dataset: str) -> DatasetManifest:
    """Raises NotFound: there is none, or it is another API key's."""
    manifest = await services.threads.run(services.store.get, *parse_dataset_ref(dataset))
    if not sees(manifest.key_id):
        raise NotFound(f"dataset {dataset!r} does not exist", param="dataset")
    return manifest


@routes.get("/v1/datasets/{dataset}", Permission(TRAIN_OR_ADMIN))
async def get_dataset(dataset: DatasetPath, services: Services) -> DatasetObject:
    """A version: `name@n`, or the newest one of `name`."""
    return DatasetObject.of(await _own(services, dataset))


@routes.get("/v1/datasets/{dataset}/rows", Permission(TRAIN_OR_ADMIN))
async def list_rows(
    dataset: DatasetPath,
    services: Services,
    split: Split = "train",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int, Query(ge=-1, lt=2**53)] = -1,
) -> DatasetRows:
    """Rows of a split in their order. `after` is the last index of the page before."""
    manifest = await _own(services, dataset)
    rows = await services.threads.run(lambda: list(services.store.rows(manifest, split, after + 1, limit)))
    total = manifest.rows[split]
    more = after + 1 + len(rows) < total
    return DatasetRows(dataset=manifest.ref, split=split, data=rows, total=total, has_more=more)


@routes.get(
    "/v1/datasets/{dataset}/examples",
    Permission(TRAIN_OR_ADMIN),
    response_class=Response,
    responses={200: {"content": {"application/x-jsonl": {"schema": {"type": "string"}}}}},
)
async def export_examples(
    dataset: DatasetPath, services: Services, kind: ExampleKind, split: Split = "train"
) -> Response:
    """Examples of a job's kind as JSONL, made of the rows of a split: `temper train submit KIND --data` takes them."""
    manifest = await _own(services, dataset)

    def convert() -> list[bytes]:
        return [to_json(one) + b"\n" for one in examples_of(kind, services.store.rows(manifest, split))]

    return StreamingResponse(iter(await services.threads.run(convert)), media_type="application/x-jsonl")


@routes.delete(
    "/v1/datasets/{dataset}",
    Permission(TRAIN_OR_ADMIN, audited=True, idempotent=True),
    response_model=DeletedDataset,
)
async def delete_dataset(dataset: DatasetPath, services: Services, once: Once) -> Any:
    """Removes a version, `name@n`, or all versions of `name`, that no unfinished job learns from. Their numbers are not
    used again."""

    async def delete() -> DeletedDataset:
        manifest = await _own(services, dataset)
        _, number = parse_dataset_ref(dataset)
        numbers = [number]
        if number is None:
            numbers = list(await services.threads.run(services.store.versions, manifest.name))
        await _check_unused(services, {f"{manifest.name}@{one}" for one in numbers})
        for one in numbers:
            found = await services.threads.run(services.store.get, manifest.name, one)
            await services.threads.run(services.store.delete, found)
        return DeletedDataset(id=dataset, versions=[one for one in numbers if one is not None])

    return await once(delete)


async def _check_unused(services: DatasetServices, versions: Collection[str]) -> None:
    """Raises Conflict: a job has rows of a version, which an erasure finds by it."""
    for job in await services.erasure.queue.unfinished():
        if job.dataset in versions:
            raise Conflict(
                f"{job.id} learns from {job.dataset}: cancel it, or wait until it has ended", param="dataset"
            )


@routes.delete("/v1/users/{user}", Permission(INFERENCE | TRAIN | ADMIN, audited=True))
async def erase_user(user: Annotated[str, Path(min_length=1, max_length=256)], services: Services) -> ErasedUser:
    """Erases a user: what it said, its logged requests, and the rows of data sets that come from either;
    unfinished jobs that have such rows are cancelled. Of the caller's API key; an administrator erases it from
    everybody's."""
    mine = None if sees(None) else owner()
    requests = await services.threads.run(services.log.erase_user, user, mine)
    feedback = await services.feedback.delete_all(FeedbackFilter(mine, user=user))
    erased = await services.erasure.erase(user_mark(user, mine))
    return ErasedUser(
        feedback=feedback,
        requests=requests,
        datasets=erased.datasets,
        suites=erased.suites,
        evaluations=erased.evaluations,
        jobs=erased.jobs,
    )
