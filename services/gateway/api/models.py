"""GET /v1/models: the base model and every adapter."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import structlog
from fastapi import Query

from services.common.adapters.composition import MAX_TEXT, Published, parse_composition, parse_published, versions_of
from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest, ModelNotFound, Unavailable
from services.gateway.api.adapters.routes import Adapters, AdapterServices
from services.gateway.api.base.routing import Routes
from services.gateway.auth.route_permissions import ANY_KEY, Permission
from services.gateway.protocol.models import ModelList, ModelObject

routes = Routes("models")
Cursor = Annotated[str | None, Query(max_length=MAX_TEXT)]
_PATIENCE = 1.5
"""Longest time that a list waits for the object store. Clients ask for the models first, and completions do not need
the store."""
log = structlog.get_logger(__name__)


async def _adapters(adapters: AdapterServices) -> tuple[str | None, dict[str, int]]:
    """Attached adapter, and the current version of every adapter. While the object store is away, engines tell both."""
    try:
        async with asyncio.timeout(_PATIENCE):
            pointers = await adapters.threads.run(adapters.registry.pointers)
    except (Unavailable, TimeoutError) as error:
        log.warning("adapters are listed from the engines", error=str(error) or "the object store hangs")
        current: dict[str, int] = {}
        for client in adapters.engines.clients:
            for text in client.status.loaded_adapters if client.status is not None else ():
                for version in versions_of(parse_published(text)):
                    current[version.name] = max(current.get(version.name, 0), version.version)
        return adapters.engines.attached, current
    return (None if pointers.attached is None else str(pointers.attached)), pointers.adapters


def _model(
    adapters: AdapterServices, model: str, *, root: str | None, parent: str | None, adapter: str | None, attached: bool
) -> ModelObject:
    info, created = adapters.engines.info, adapters.engines.created
    context = info.max_model_len if info is not None else None
    return ModelObject(
        id=model,
        created=created,
        root=root or (info.name if info is not None else model),
        parent=parent,
        max_model_len=context,
        adapter=adapter,
        attached=attached,
        display_name=model,
        created_at=datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=context,
    )


def _base(adapters: AdapterServices, attached: str | None) -> ModelObject:
    name = adapters.settings.served_model_name
    return _model(adapters, name, root=None, parent=None, adapter=attached, attached=False)


def _adapter(adapters: AdapterServices, model: str, version: Published, attached: str | None) -> ModelObject:
    """Entry of an adapter, or of several that answer together. ``model`` is its name in a request, with or without the
    version."""
    name, parent = str(version), adapters.settings.served_model_name
    return _model(adapters, model, root=name, parent=parent, adapter=name, attached=attached == name)


async def _exists(adapters: AdapterServices, version: AdapterVersion) -> bool:
    """True if there is such a version. While the object store is away: if an engine has it."""
    try:
        async with asyncio.timeout(_PATIENCE):
            manifest = await adapters.threads.run(adapters.registry.manifest, version)
            return manifest.kind == "adapter"
    except ModelNotFound:
        return False
    except (Unavailable, TimeoutError) as error:
        log.warning("a version is looked for in the engines", error=str(error) or "the object store hangs")
        statuses = [client.status for client in adapters.engines.clients if client.status is not None]
        return any(str(version) in status.loaded_adapters for status in statuses)


@routes.get("/v1/models", Permission(ANY_KEY))
async def list_models(
    adapters: Adapters,
    limit: Annotated[int | None, Query(ge=1, le=1000, description="Models of a page; default: all.")] = None,
    after_id: Cursor = None,
    before_id: Cursor = None,
) -> ModelList:
    """The base model, with the adapter that answers under its name, and the adapters. Pages are Anthropic's: from
    behind `after_id` on, or the last ones that stand before `before_id`."""
    attached, current = await _adapters(adapters)
    versions = [AdapterVersion(name, number) for name, number in sorted(current.items())]
    models = [_base(adapters, attached), *(_adapter(adapters, v.name, v, attached) for v in versions)]
    if after_id is not None and before_id is not None:
        raise InvalidRequest("after_id and before_id ask for two pages: send one of them", param="before_id")
    if after_id is not None:
        models = models[_place(models, after_id, "after_id") + 1 :]
    if before_id is not None:
        models = models[: _place(models, before_id, "before_id")]
    most = len(models) if limit is None else limit
    page = models[:most] if before_id is None else models[-most:]
    return ModelList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(models) > most,
    )


def _place(models: list[ModelObject], model: str, param: str) -> int:
    """Place of a model in the list. Raises ModelNotFound."""
    for place, one in enumerate(models):
        if one.id == model:
            return place
    raise ModelNotFound(f"model {model[:80]!r} does not exist", param=param)


@routes.get("/v1/models/{model:path}", Permission(ANY_KEY))
async def get_model(model: str, adapters: Adapters) -> ModelObject:
    """One of them, a version of an adapter, "name@3", or adapters that answer together, "a@3*0.7+b"."""
    attached, current = await _adapters(adapters)
    if model == adapters.settings.served_model_name:
        return _base(adapters, attached)
    if model in current:
        return _adapter(adapters, model, AdapterVersion(model, current[model]), attached)
    with suppress(InvalidRequest):
        fixed = parse_composition(model).fix(current)
        if fixed is not None and all([await _exists(adapters, version) for version in fixed.versions]):
            return _adapter(adapters, model, fixed, attached)
    raise ModelNotFound(f"model {model[:80]!r} does not exist", param="model")
