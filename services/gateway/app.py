"""The gateway as a FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI

from services.common.queue import JobQueue
from services.common.registry import AdapterRegistry
from services.common.store import ObjectStore
from services.gateway.api import (
    adapter_tools,
    adapters,
    chat,
    completions,
    health,
    messages,
    models,
    sessions,
    tokenize,
    training,
)
from services.gateway.engines import EnginePool
from services.gateway.errors import install_error_handlers
from services.gateway.metrics import GatewayMetrics
from services.gateway.middleware import BodyLimit, RequestContext
from services.gateway.settings import GatewaySettings
from services.gateway.state import Gateway

log = structlog.get_logger(__name__)
Stores = Callable[[GatewaySettings], tuple[AdapterRegistry, JobQueue]]

_DESCRIPTION = """OpenAI's completions over adapters that are trained while they serve.

Every error has the body `{"error": {"message", "type", "param", "code"}}`, under `/v1/messages` the one of Anthropic's
API. Unknown fields are refused by name."""


def open_stores(settings: GatewaySettings) -> tuple[AdapterRegistry, JobQueue]:
    """The object store and the job queue that the settings name. Connects on first use, so neither has to be up."""
    return AdapterRegistry(ObjectStore(settings), settings.served_model_name), JobQueue(settings)


def create_app(settings: GatewaySettings, *, stores: Stores = open_stores) -> FastAPI:
    """Builds the application; its lifespan connects to the engines.

    Args:
        settings: everything that can be set.
        stores: makes the adapter registry and the job queue.
    """
    metrics = GatewayMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        registry, queue = stores(settings)
        gateway = Gateway(settings, EnginePool(settings), registry, queue, metrics)
        app.state.gateway = gateway
        gateway.engines.start()
        log.info("gateway started", engines=settings.engine_addresses, model=settings.served_model_name)
        try:
            yield
        finally:
            gateway.stopping.set()
            await gateway.engines.stop()
            await queue.aclose()
            gateway.close()
            log.info("gateway stopped")

    app = FastAPI(
        title="Temper",
        description=_DESCRIPTION,
        version="1",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url="/docs",
        redoc_url=None,
    )
    install_error_handlers(app)
    for resource in (
        chat,
        completions,
        messages,
        tokenize,
        models,
        adapter_tools,
        adapters,
        training,
        sessions,
        health,
    ):
        app.include_router(resource.routes)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, upload_limit=settings.max_upload_bytes)
    app.add_middleware(RequestContext, metrics=metrics)
    return app
