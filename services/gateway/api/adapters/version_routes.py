"""/v1/adapters/{name}/merge, /rollback and /prune: what is done with versions that exist."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from services.common.adapters.manifest import Manifest
from services.common.adapters.names import AdapterVersion, check_adapter_name, parse_adapter_ref
from services.common.adapters.retention import RetentionPolicy, prune
from services.common.errors import AdapterRejected, InvalidRequest, TemperError
from services.common.jobs import MergeJob
from services.common.jobs.fields.lora import stated_shape
from services.common.jobs.kinds.merge import exact_sum_over
from services.common.queue.records import spec_sha
from services.common.telemetry import tracing
from services.gateway.api.adapters.routes import Adapters, AdapterServices
from services.gateway.api.base.idempotency import IdempotencyKey, Once
from services.gateway.api.base.routing import Routes
from services.gateway.auth.caller import owner
from services.gateway.auth.route_permissions import ADMIN, ATTACH, Permission
from services.gateway.protocol.models import AdapterPath, MergeRequest, PruneRequest, RollbackRequest

routes = Routes("adapters")


@routes.post("/v1/adapters/{name}/merge", Permission(ADMIN, audited=True, idempotent=True), status_code=202)
async def merge_adapters(
    name: AdapterPath,
    response: Response,
    body: MergeRequest,
    adapters: Adapters,
    idempotency_key: IdempotencyKey = None,
) -> dict[str, Any]:
    """Queues a merge of versions into a new version of this adapter; follow it like a training job.

    With an Idempotency-Key, sending it again returns the same job.
    """
    adapters.registry.check_new_name(name)
    await adapters.threads.run(adapters.registry.check_kind, name, "adapter")
    sent = MergeJob(adapter=name, **body.model_dump())
    sha = await asyncio.to_thread(spec_sha, sent)
    job = None if idempotency_key is None else await adapters.queue.submitted(idempotency_key, sha, key_id=owner())
    if job is None:
        spec = await _pinned(adapters, sent)
        job = await adapters.queue.submit(
            spec, idempotency_key=idempotency_key, request_sha=sha, traceparent=tracing.current(), key_id=owner()
        )
    response.headers["location"] = f"/v1/train/jobs/{job.id}"
    return job.model_dump(mode="json")


async def _pinned(adapters: AdapterServices, sent: MergeJob) -> MergeJob:
    """Merge job with the version of every source, checked for whether an engine could merge and serve it.

    Raises:
        ModelNotFound: a source does not exist.
        AdapterRejected: it belongs to another base model.
        InvalidRequest: two sources are the same version, or the result's rank is over the engines' limit.
    """
    manifests = [await _source(adapters, source.adapter, index) for index, source in enumerate(sent.sources)]
    refs = [str(manifest.ref) for manifest in manifests]
    for ref in refs:
        if refs.count(ref) > 1:
            raise InvalidRequest(f"{ref} is among the sources more than once: add its weights up", param="sources")
    info = adapters.engines.served.info
    for index, manifest in enumerate(manifests):
        manifest.check_adapter(f"sources[{index}].adapter")
        if manifest.base_digest and manifest.base_digest != info.digest:
            raise AdapterRejected(
                f"{manifest.ref} belongs to base model {manifest.base_digest[:12]}, the engines serve "
                f"{info.digest[:12]}: only versions of one base model can be merged",
                param=f"sources[{index}].adapter",
            )
    if sent.rank is None and info.max_lora_rank:
        configs = [await adapters.threads.run(adapters.registry.config, manifest.ref) for manifest in manifests]
        _check_sum(configs, info.max_lora_rank)
    if info.max_lora_rank and sent.rank is not None and sent.rank > info.max_lora_rank:
        raise InvalidRequest(
            f"rank is {sent.rank} and the engines take at most {info.max_lora_rank} (TEMPER_MAX_LORA_RANK): choose a "
            "lower one",
            param="rank",
        )
    sources = [source.model_copy(update={"adapter": ref}) for source, ref in zip(sent.sources, refs, strict=True)]
    return sent.model_copy(update={"sources": sources})


def _check_sum(configs: Sequence[Mapping[str, Any]], highest: int) -> None:
    """Checks the rank of a merge whose job names none: it is the largest sum of the sources' ranks over any layer.
    Where only the files tell which layers have which rank, the trainer checks it."""
    shapes = [stated_shape(config) for config in configs]
    if any(config.get("rank_pattern") for config in configs):
        return
    if not all({"rank", "target_modules"} <= shape.keys() for shape in shapes):
        return
    modules = {name for shape in shapes for name in shape["target_modules"]}
    needed = max(sum(shape["rank"] for shape in shapes if name in shape["target_modules"]) for name in modules)
    if needed > highest:
        raise exact_sum_over(needed, highest)


async def _source(adapters: AdapterServices, ref: str, index: int) -> Manifest:
    name, number = parse_adapter_ref(ref)
    try:
        version = (
            await adapters.threads.run(adapters.registry.current, name)
            if number is None
            else AdapterVersion(name, number)
        )
        return await adapters.threads.run(adapters.registry.manifest, version)
    except TemperError as error:
        error.param = f"sources[{index}].adapter"
        raise


@routes.post(
    "/v1/adapters/{name}/rollback", Permission(ATTACH, audited=True, idempotent=True), response_model=dict[str, Any]
)
async def roll_back(name: AdapterPath, adapters: Adapters, once: Once, body: RollbackRequest | None = None) -> Any:
    """Makes an earlier version current, and attached if a newer one of this adapter is.

    409 if there is no earlier one, or if another version became current meanwhile.
    """

    async def move() -> dict[str, Any]:
        check_adapter_name(name)
        number = body.version if body is not None else None
        # A gateway that died behind the move has kept no answer: the pointer knows that it was made.
        request = once.digest(f"{name}@{number}".encode()) if once.key is not None else None
        done = await adapters.threads.run(adapters.registry.rollback, name, number, request=request)
        await adapters.tell(name)
        answers = await adapters.calls.sync()
        return {
            "object": "rollback",
            "name": name,
            "before": str(done.before),
            "current": str(done.after),
            "attached": None if done.attached is None else str(done.attached),
            "moves": await adapters.threads.run(adapters.registry.moves, name),
            "engines": len(answers),
        }

    return await once(move, body=body)


@routes.post(
    "/v1/adapters/{name}/prune", Permission(ADMIN, audited=True, idempotent=True), response_model=dict[str, Any]
)
async def prune_adapter(name: AdapterPath, adapters: Adapters, once: Once, body: PruneRequest) -> Any:
    """Removes old versions: never the current one, one that is attached, or one that an unfinished job needs.

    An engine that has a removed version loaded finishes what it answers with it.
    """

    async def remove() -> dict[str, Any]:
        check_adapter_name(name)
        policy = RetentionPolicy(body.keep, body.days)
        needed = await adapters.queue.versions_needed()
        pruned = await adapters.threads.run(prune, adapters.registry, name, policy, in_use=needed, dry_run=body.dry_run)
        return {
            "object": "prune",
            "name": name,
            "dry_run": body.dry_run,
            "removed": [str(manifest.ref) for manifest in sorted(pruned.removed, key=lambda m: m.version)],
            "kept": [
                {"version": f"{name}@{number}", "reason": reason} for number, reason in sorted(pruned.kept.items())
            ],
            "freed_bytes": pruned.freed_bytes,
        }

    return await once(remove, body=body)
