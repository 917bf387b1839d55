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
    batches,
    chat,
    completions,
    embeddings,
    files,
    health,
    models,
    responses,
    scores,
    sessions,
    training,
)
from services.gateway.batches.host import BatchStores, open_batching
from services.gateway.batches.worker import BatchWorker
from services.gateway.engines import EnginePool
from services.gateway.errors import install_error_handlers
from services.gateway.metrics import GatewayMetrics
from services.gateway.middleware import BodyLimit, RequestContext
from services.gateway.responses.store import ResponseStore
from services.gateway.settings import GatewaySettings
from services.gateway.state import Gateway

log = structlog.get_logger(__name__)
Stores = Callable[[GatewaySettings], tuple[AdapterRegistry, JobQueue]]

_DESCRIPTION = """OpenAI's completions over adapters that are trained while they serve.

Every error has the body `{"error": {"message", "type", "param", "code"}}`. Unknown fields are refused by name."""


def open_stores(settings: GatewaySettings) -> tuple[AdapterRegistry, JobQueue]:
    """The object store and the job queue that the settings name. Connects on first use, so neither has to be up."""
    return AdapterRegistry(ObjectStore(settings), settings.served_model_name), JobQueue(settings)


def create_app(
    settings: GatewaySettings,
    *,
    stores: Stores = open_stores,
    keep_responses: Callable[[GatewaySettings], ResponseStore] = ResponseStore,
    batching: Callable[[GatewaySettings], BatchStores] = open_batching,
) -> FastAPI:
    """Builds the application; its lifespan connects to the engines.

    Args:
        settings: everything that can be set.
        stores: makes the adapter registry and the job queue.
        keep_responses: makes the store of responses.
        batching: makes where files and batches are.
    """
    metrics = GatewayMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        registry, queue = stores(settings)
        batch_stores = batching(settings)
        gateway = Gateway(
            settings, EnginePool(settings), registry, queue, metrics, keep_responses(settings), batch_stores
        )
        app.state.gateway = gateway
        gateway.engines.start()
        gateway.background.start()
        worker = app.state.batch_worker = BatchWorker(app, gateway, batch_stores)
        worker.start()
        log.info("gateway started", engines=settings.engine_addresses, model=settings.served_model_name)
        try:
            yield
        finally:
            gateway.stopping.set()
            await worker.stop()
            await gateway.background.stop()
            await gateway.engines.stop()
            await gateway.responses.aclose()
            await queue.aclose()
            await batch_stores.queue.aclose()
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
        embeddings,
        scores,
        responses,
        models,
        adapter_tools,
        adapters,
        training,
        sessions,
        files,
        batches,
        health,
    ):
        app.include_router(resource.routes)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, upload_limit=settings.max_upload_bytes)
    app.add_middleware(RequestContext, metrics=metrics)
    return app
