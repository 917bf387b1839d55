"""GET /v1/models: the base model and every adapter."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from services.common.errors import ModelNotFound, Unavailable
from services.common.names import AdapterVersion, parse_adapter_ref
from services.gateway.api.routing import router
from services.gateway.state import Gateway, GatewayDep

routes = router("models")
_PATIENCE = 1.5
"""Seconds for the object store: clients ask for the models first, and completions do not need it."""
log = structlog.get_logger(__name__)


async def _adapters(gateway: Gateway) -> tuple[str | None, dict[str, int]]:
    """What is attached, and the current version of every adapter; without the object store, what engines report."""
    try:
        async with asyncio.timeout(_PATIENCE):
            pointers = await gateway.store(gateway.registry.pointers)
    except (Unavailable, TimeoutError) as error:
        log.warning("adapters are listed from the engines", error=str(error) or "the object store hangs")
        current: dict[str, int] = {}
        for client in gateway.engines.clients:
            for text in client.status.loaded_adapters if client.status is not None else ():
                name, version = parse_adapter_ref(text)
                current[name] = max(current.get(name, 0), version or 0)
        return gateway.engines.attached, current
    return (None if pointers.attached is None else str(pointers.attached)), dict(pointers.current)


def _base(gateway: Gateway, attached: str | None) -> dict[str, Any]:
    name = gateway.settings.served_model_name
    info = gateway.engines.info
    return {
        "id": name,
        "object": "model",
        "created": gateway.engines.created,
        "owned_by": "temper",
        "root": info.name if info is not None else name,
        "parent": None,
        "max_model_len": info.max_model_len if info is not None else None,
        "adapter": attached,
    }


def _adapter(gateway: Gateway, version: AdapterVersion, attached: str | None) -> dict[str, Any]:
    return {
        "id": version.name,
        "object": "model",
        "created": gateway.engines.created,
        "owned_by": "temper",
        "root": str(version),
        "parent": gateway.settings.served_model_name,
        "max_model_len": gateway.engines.info.max_model_len if gateway.engines.info is not None else None,
        "adapter": str(version),
        "attached": attached == str(version),
    }


@routes.get("/v1/models")
async def list_models(gateway: GatewayDep) -> dict[str, Any]:
    """The base model, with the adapter that answers under its name, and the adapters."""
    attached, current = await _adapters(gateway)
    versions = [AdapterVersion(name, number) for name, number in sorted(current.items())]
    return {
        "object": "list",
        "data": [_base(gateway, attached), *(_adapter(gateway, version, attached) for version in versions)],
    }


@routes.get("/v1/models/{model:path}")
async def get_model(model: str, gateway: GatewayDep) -> dict[str, Any]:
    """One of them."""
    attached, current = await _adapters(gateway)
    if model == gateway.settings.served_model_name:
        return _base(gateway, attached)
    if model in current:
        return _adapter(gateway, AdapterVersion(model, current[model]), attached)
    raise ModelNotFound(f"model {model[:80]!r} does not exist", param="model")
