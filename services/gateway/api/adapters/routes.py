"""/v1/adapters: versions, uploads, downloads, and what is attached to the base model's name."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any

import structlog
from fastapi import Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from services.common.adapters.manifest import FILES, kind_of
from services.common.adapters.names import NAME_SCHEMA, AdapterVersion, check_adapter_name
from services.common.adapters.receipts import Receipt
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry, Manifest, Pointers
from services.common.errors import AdapterRejected, Conflict, NewerSchema, NotFound, Unavailable
from services.common.queue.job_queue import JobQueue
from services.gateway.api.adapters.files import check_files, read_form, tar_gz
from services.gateway.api.base.forms import form_of
from services.gateway.api.base.idempotency import Once
from services.gateway.api.base.routing import Routes, multipart, provided
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.auth.route_permissions import ADMIN, ANY_KEY, ATTACH, TRAIN_OR_ADMIN, Permission
from services.gateway.core.file_store import StoreThreads
from services.gateway.core.webhook_store import WebhookStore
from services.gateway.engines.calls.adapters import AdapterCalls
from services.gateway.engines.pool import EnginePool
from services.gateway.protocol.fields.listing import Listing
from services.gateway.protocol.models import AdapterPath, VersionRequest
from services.gateway.settings import GatewaySettings

_UPLOADS = 2
log = structlog.get_logger("adapters")


@dataclass(frozen=True, slots=True)
class AdapterServices:
    """Adapters in the object store, and the engines that serve them."""

    settings: GatewaySettings
    engines: EnginePool
    calls: AdapterCalls
    registry: AdapterRegistry
    """Registry of adapters. It blocks, so it is only called in ``threads``."""
    queue: JobQueue
    threads: StoreThreads
    webhooks: WebhookStore
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_UPLOADS))
    """Semaphore held while an upload is in memory."""

    async def tell(self, name: str) -> None:
        """Tells webhooks of what has moved. What is not told now, is by the next look at the pointers."""
        try:
            changes, _ = await self.threads.run(self.registry.changes, {}, name)
            await self.webhooks.tell(changes)
        except Unavailable as error:
            log.warning("webhooks.told_later", adapter=name, error=error.message)


Adapters = Annotated[AdapterServices, provided(AdapterServices)]


routes = Routes("adapters")

_UPLOAD = multipart(
    {
        "name": {"type": "string", **NAME_SCHEMA},
        **{part: {"type": "string", "format": "binary", "minLength": 1} for parts in FILES.values() for part in parts},
    },
    required=("name",),
    either=tuple(FILES.values()),
)
VersionQuery = Annotated[int | None, Query(ge=1, lt=2**53)]


def _summary(name: str, number: int, pointers: Pointers) -> dict[str, Any]:
    attached = pointers.attached if pointers.attached is not None and pointers.attached.name == name else None
    return {
        "object": "adapter",
        "name": name,
        "kind": "drafter" if name in pointers.drafters else "adapter",
        "current": number,
        "version": f"{name}@{number}",
        "attached": None if attached is None else str(attached),
    }


def _version(manifest: Manifest, *, current: int | None, attached: AdapterVersion | None) -> dict[str, Any]:
    return {
        "object": "adapter.version",
        "id": str(manifest.ref),
        **manifest.model_dump(mode="json"),
        "size_bytes": manifest.size_bytes,
        "current": manifest.version == current,
        "attached": attached == manifest.ref,
    }


async def _pick(adapters: AdapterServices, name: str, version: int | None) -> AdapterVersion:
    check_adapter_name(name)
    if version is None:
        return await adapters.threads.run(adapters.registry.current, name)
    return AdapterVersion(name, version)


@routes.get("/v1/adapters", Permission(ANY_KEY))
async def list_adapters(adapters: Adapters) -> dict[str, Any]:
    """Every adapter and drafter with its current version."""
    unreadable = Unreadable(own=True)
    pointers = await adapters.threads.run(adapters.registry.pointers, unreadable)
    return {
        "object": "list",
        "data": [_summary(name, number, pointers) for name, number in sorted(pointers.current.items())],
        "attached": None if pointers.attached is None else str(pointers.attached),
    } | Listing(unreadable=unreadable).model_dump(mode="json")


@routes.post(
    "/v1/adapters",
    Permission(ADMIN, audited=True, upload=True, idempotent=True),
    status_code=201,
    openapi_extra=_UPLOAD,
)
async def upload_adapter(request: Request, adapters: Adapters, once: Once) -> Any:
    """Publishes a version from PEFT files, or of a drafter from its own, after an engine has bound them strictly to the
    base model."""
    parts = f"name, {WEIGHTS} and {CONFIG}, or name, {' and '.join(FILES['drafter'])}"
    async with form_of(request, parts=parts, files=4) as form, adapters.uploads:
        name, files = await read_form(form)
        request.state.audit_targets = [name]

        if once.key is None:
            return await _publish(adapters, name, files)
        said = await asyncio.to_thread(_said, name, files)
        return await once.keep(said, lambda: _publish(adapters, name, files, once=f"upload-{once.digest(said)}"))


async def _publish(
    adapters: AdapterServices, name: str, files: dict[str, bytes], *, once: str | None = None
) -> dict[str, Any]:
    """Publishes an upload.

    Args:
        once: name under which it is published once, also if a gateway dies between doing so and noting it.
    """
    adapters.registry.check_new_name(name)
    await adapters.threads.run(adapters.registry.check_kind, name, kind_of(files))
    digest = adapters.engines.served.info.digest
    await adapters.threads.run(check_files, files)
    await adapters.calls.validate(files)
    manifest = await adapters.threads.run(lambda: adapters.registry.publish(name, files, base_digest=digest, once=once))
    await adapters.calls.sync()
    return _version(manifest, current=manifest.version, attached=None)


def _said(name: str, files: dict[str, bytes]) -> bytes:
    """Content that an idempotency key of an upload stands for: the name, and the digests of the files.

    The body itself would differ each time the same files are sent: its multipart boundary is random."""
    digests = [hashlib.sha256(files[file]).hexdigest() for file in sorted(files)]
    return "\0".join([name, *digests]).encode()


@routes.get("/v1/adapters/{name}", Permission(ANY_KEY))
async def get_adapter(name: AdapterPath, adapters: Adapters) -> dict[str, Any]:
    """One adapter, with the manifest of its current version."""
    current = await _pick(adapters, name, None)
    manifest = await adapters.threads.run(adapters.registry.manifest, current)
    pointers = await adapters.threads.run(adapters.registry.pointers)
    summary = _summary(name, current.version, pointers)
    return {**summary, "manifest": _version(manifest, current=current.version, attached=pointers.attached)}


@routes.delete("/v1/adapters/{name}", Permission(ADMIN, audited=True, idempotent=True), response_model=dict[str, Any])
async def delete_adapter(name: AdapterPath, adapters: Adapters, once: Once) -> Any:
    """Removes an adapter with all its versions; 409 while one of them is attached."""

    async def delete() -> dict[str, Any]:
        check_adapter_name(name)
        await adapters.threads.run(adapters.registry.delete, name)
        await adapters.calls.sync()
        return {"object": "adapter", "name": name, "deleted": True}

    return await once(delete)


@routes.get("/v1/adapters/{name}/versions", Permission(ANY_KEY))
async def list_versions(name: AdapterPath, adapters: Adapters) -> dict[str, Any]:
    """All versions, oldest first."""
    unreadable = Unreadable(own=True)  # adapters are everybody's
    manifests = await adapters.threads.run(adapters.registry.versions, check_adapter_name(name), unreadable)

    def pass_over(other: str, key_id: str | None, error: NewerSchema) -> None:  # noqa: ARG001  (a PassOver)
        if other == name:  # nobody knows which version is current
            raise error

    pointers = await adapters.threads.run(adapters.registry.pointers, pass_over)
    if not manifests:
        await adapters.threads.run(adapters.registry.current, name)  # 404 if there is no such adapter
    current, attached = pointers.current.get(name), pointers.attached
    data = [_version(manifest, current=current, attached=attached) for manifest in manifests]
    return {"object": "list", "data": data} | Listing(unreadable=unreadable).model_dump(mode="json")


@routes.get("/v1/adapters/{name}/versions/{version}/receipt", Permission(TRAIN_OR_ADMIN))
async def get_receipt(
    name: AdapterPath, version: Annotated[int, Path(ge=1, lt=2**53)], adapters: Adapters
) -> dict[str, Any]:
    """Receipt of a version that a job made, as `{"receipt", "signature"}`: base, parents, data, code, seeds, settings
    and device. 404: it has none."""
    data = await adapters.threads.run(adapters.registry.receipt, AdapterVersion(check_adapter_name(name), version))
    found = Receipt.read(data)
    return {"receipt": dict(found.content), "signature": None if found.signature is None else dict(found.signature)}


@routes.get("/v1/adapters/{name}/download", Permission(TRAIN_OR_ADMIN, audited=True), response_class=Response)
async def download_adapter(
    name: AdapterPath,
    adapters: Adapters,
    version: VersionQuery = None,
    file: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """The files of a version (default: the current one) as a tar.gz, or one of them with `file`."""
    picked = await _pick(adapters, name, version)
    manifest = await adapters.threads.run(adapters.registry.manifest, picked)
    if file is not None and file not in manifest.files:
        raise NotFound(f"{picked} has no file {file[:80]!r}, only {', '.join(sorted(manifest.files))}", param="file")
    files = await adapters.threads.run(adapters.registry.files, picked)
    headers = {"x-temper-adapter": str(picked)}
    if file is not None:
        media_type = "application/json" if file.endswith(".json") else "application/octet-stream"
        headers["content-disposition"] = f'attachment; filename="{file}"'
        return Response(files[file], media_type=media_type, headers=headers)
    directory = f"{picked.name}-{picked.version}"
    headers["content-disposition"] = f'attachment; filename="{directory}.tar.gz"'
    pieces = tar_gz(directory, files, modified=manifest.created_at)
    return StreamingResponse(pieces, media_type="application/gzip", headers=headers)


@routes.post(
    "/v1/adapters/{name}/attach", Permission(ATTACH, audited=True, idempotent=True), response_model=dict[str, Any]
)
async def attach_adapter(name: AdapterPath, adapters: Adapters, once: Once, body: VersionRequest | None = None) -> Any:
    """Answers requests for the base model's name with this version from now on. Refused if it belongs to another base
    model: the engines would go on with what was attached before."""

    async def attach() -> dict[str, Any]:
        picked = await _pick(adapters, name, body.version if body is not None else None)
        manifest, info = await adapters.threads.run(adapters.registry.manifest, picked), adapters.engines.info
        if info is not None and manifest.base_digest and manifest.base_digest != info.digest:
            raise AdapterRejected(
                f"{picked} belongs to base model {manifest.base_digest[:12]}, the engines serve {info.digest[:12]}",
                param="adapter",
            )
        manifest.check_adapter()
        await adapters.threads.run(adapters.registry.attach, picked)
        await adapters.tell(name)
        return await _synced(adapters, str(picked))

    return await once(attach, body=body)


@routes.post(
    "/v1/adapters/{name}/detach", Permission(ATTACH, audited=True, idempotent=True), response_model=dict[str, Any]
)
async def detach_adapter(name: AdapterPath, adapters: Adapters, once: Once, body: VersionRequest | None = None) -> Any:
    """Answers requests for the base model's name with the base model again; 409 if something else is attached."""

    async def detach() -> dict[str, Any]:
        check_adapter_name(name)
        before = await adapters.threads.run(adapters.registry.attached)
        if before is None:
            await adapters.threads.run(adapters.registry.current, name)  # 404 if there is no such adapter
            return await _synced(adapters, None)
        wanted = body.version if body is not None else None
        # Somebody may attach something else meanwhile: that stays.
        other = await adapters.threads.run(adapters.registry.detach, name, wanted)
        if other is not None:
            asked = name if wanted is None else f"{name}@{wanted}"
            raise Conflict(f"{asked} is not attached: {other} is", param="version" if wanted is not None else "adapter")
        await adapters.tell(name)
        return await _synced(adapters, None)

    return await once(detach, body=body)


async def _synced(adapters: AdapterServices, attached: str | None) -> dict[str, Any]:
    answers = await adapters.calls.sync()
    serving = sum((answer.attached or None) == attached for answer in answers)
    return {"object": "attachment", "attached": attached, "engines": len(answers), "engines_serving": serving}


@routes.add(("GET", "POST", "PUT", "DELETE"), "/v1/adapters/{rest:path}", Permission(ANY_KEY), include_in_schema=False)
async def unknown_path(request: Request, rest: str) -> None:
    """Route of names with a slash. They are refused as names, so that no path traversal looks like a missing route."""
    head = rest.split("/")[0]
    if ".." in rest or "\\" in rest or "//" in rest or "\0" in rest:
        check_adapter_name(rest)
    check_adapter_name(head)
    raise NotFound(f"no such route: {request.method} {request.url.path}")
