"""The gateway as a FastAPI application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Lifespan, Scope

from services.common.adapters.registry import AdapterRegistry
from services.common.evaluation.runs.store import EvaluationStore
from services.common.evaluation.suites.store import SuiteStore
from services.common.queue.job_queue import JobQueue
from services.common.shutdown import cancel_and_wait
from services.common.storage.object_store import ObjectStore
from services.common.telemetry.recent_logs import RecentLogs
from services.common.telemetry.tracing import open_tracer
from services.gateway.api.adapters.loading import AdapterDirectory
from services.gateway.api.adapters.routes import AdapterServices
from services.gateway.api.base.idempotency import Idempotency, RedisRecords
from services.gateway.api.base.openapi import add_examples, whole_bounds
from services.gateway.api.base.routing import provide
from services.gateway.api.base.serving import CANARY_HEADER
from services.gateway.api.batches.stores import BatchServices, BatchStores, open_batching
from services.gateway.api.batches.worker import BatchWorker
from services.gateway.api.evaluation.services import EvaluationServices
from services.gateway.api.learning.canaries import CanaryServices
from services.gateway.api.learning.datasets import DatasetServices
from services.gateway.api.learning.erasure import Erasure
from services.gateway.api.learning.feedback import FeedbackServices, open_feedback
from services.gateway.api.learning.learner_controller import LearnerController
from services.gateway.api.learning.learner_work import LearnerWork
from services.gateway.api.learning.learners import LearnerServices, open_learners
from services.gateway.api.learning.request_log import RequestLogServices, open_index
from services.gateway.api.operations.engine_watch import EngineWatch
from services.gateway.api.operations.health import HealthServices, QueueWatch
from services.gateway.api.operations.keys import KeyServices
from services.gateway.api.operations.logs import LogServices
from services.gateway.api.operations.webhook_sender import WebhookSender
from services.gateway.api.operations.webhooks import WebhookServices
from services.gateway.api.responses.documents import DocumentStore
from services.gateway.api.responses.serving import BackgroundResponses, ResponseServices
from services.gateway.api.responses.store import BestEffortStore, ResponseStore
from services.gateway.api.surfaces import API
from services.gateway.api.training.forge import ForgeServices
from services.gateway.api.training.forge import tidy as tidy_forge
from services.gateway.api.training.sessions import TrainingSessionServices
from services.gateway.api.training.tinker.services import TinkerServices
from services.gateway.api.training.validation import TrainingServices
from services.gateway.auth.browsers import BrowserGuard
from services.gateway.auth.route_permissions import PERMISSION, Permission, PermissionTable, add_keys
from services.gateway.core.admission import Admission, Lifecycle
from services.gateway.core.errors import install_error_handlers
from services.gateway.core.file_store import StoreThreads
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.tidying import Chore, Tidying
from services.gateway.core.webhook_store import WebhookStore
from services.gateway.engines.calls.adapters import AdapterCalls
from services.gateway.engines.calls.conversation_sessions import ConversationSessionRouter
from services.gateway.engines.calls.training_sessions import TrainingSessionRouter
from services.gateway.engines.pool import EnginePool
from services.gateway.inference.canaries import Canaries
from services.gateway.inference.context import InferenceContext
from services.gateway.middleware.authentication import TIMEOUT_HEADER, Authentication
from services.gateway.middleware.request_body import BodyDecoding, BodyLimit, BodyMemory
from services.gateway.middleware.request_context import HeadRequests, RequestContext
from services.gateway.rate_limits.limiter import RateLimiter
from services.gateway.server.named_files import RequestLogging, open_audit_log, open_certificates, open_keys
from services.gateway.settings import GatewaySettings
from services.gateway.ui.routes import dashboard_routes
from services.learning.canaries.controller import CanaryController
from services.learning.canaries.controller import Stores as CanaryStores
from services.learning.canaries.store import CanaryStore
from services.learning.datasets.maker import DatasetMaker
from services.learning.datasets.store import DatasetStore
from services.learning.feedback.store import FeedbackStore
from services.learning.learners.store import LearnerStore
from services.learning.request_log.index import RequestIndex
from services.learning.request_log.log import RequestLog
from services.learning.request_log.parts import Parts

log = structlog.get_logger(__name__)
_CORS_HEADERS = (
    "authorization",
    "content-type",
    "idempotency-key",
    "last-event-id",
    "traceparent",
    "x-api-key",
    "x-request-id",
    "x-session-id",
    TIMEOUT_HEADER,
    # What the clients of OpenAI and Anthropic send by themselves.
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    "anthropic-version",
    "openai-beta",
    "openai-organization",
    "openai-project",
    *(f"x-stainless-{part}" for part in ("arch", "helper-method", "lang", "os", "package-version")),
    *(f"x-stainless-{part}" for part in ("poll-helper", "retry-count", "runtime", "runtime-version", "timeout")),
)
_EXPOSED_HEADERS = (
    "idempotency-replayed",
    "location",
    "retry-after",
    "x-request-id",
    "x-temper-adapter",
    CANARY_HEADER,
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
Stores = Callable[[GatewaySettings], tuple[AdapterRegistry, JobQueue]]

_LOG_SECONDS = 3.0
"""Time in which a gateway that stops hands its part of the request log on; the next one does what is left."""
_DESCRIPTION = """OpenAI's completions over adapters that are trained while they serve.

Every error has the body `{"error": {"message", "type", "param", "code"}}`, under `/v1/messages` the one of Anthropic's
API. The header `x-request-timeout-seconds` bounds the time of a completion. Unknown fields and query
parameters are refused by name."""


def open_stores(settings: GatewaySettings) -> tuple[AdapterRegistry, JobQueue]:
    """The object store and the job queue that the settings name. Connects on first use, so neither has to be up."""
    return AdapterRegistry(ObjectStore(settings), settings.served_model_name), JobQueue(settings)


def create_app(
    settings: GatewaySettings,
    *,
    recent: RecentLogs | None = None,
    stores: Stores = open_stores,
    keep_responses: Callable[[GatewaySettings], ResponseStore] = ResponseStore,
    keep_documents: Callable[[ResponseStore], DocumentStore] = DocumentStore,
    keep_feedback: Callable[[GatewaySettings], FeedbackStore] = open_feedback,
    keep_canaries: Callable[[GatewaySettings], CanaryStore] = CanaryStore,
    keep_learners: Callable[[GatewaySettings], LearnerStore] = open_learners,
    keep_webhooks: Callable[[GatewaySettings], WebhookStore] = WebhookStore,
    index_requests: Callable[[GatewaySettings], RequestIndex] = open_index,
    batching: Callable[[GatewaySettings], BatchStores] = open_batching,
) -> FastAPI:
    """Builds the application; its lifespan connects to the engines.

    Args:
        settings: everything that can be set.
        recent: last lines of this process's log; None: none are kept.
        stores: makes the adapter registry and the job queue.
        keep_responses: makes the store of responses.
        keep_documents: makes the one of stored chats and conversations.
        keep_feedback: makes the one of feedback.
        keep_canaries: makes the one of canaries.
        keep_learners: makes the one of learners.
        keep_webhooks: makes the one of deliveries to webhooks.
        index_requests: makes the index of logged requests.
        batching: makes where files and batches are.

    Raises:
        BadSetting: a file that a setting names cannot be used.
    """
    metrics = GatewayMetrics()
    keys = open_keys(settings, metrics)
    audit = open_audit_log(settings, metrics)
    quotas = RateLimiter(settings, metrics)
    tracer = open_tracer(settings, "gateway")
    admission = Admission(settings.max_in_flight)
    certificates = open_certificates(settings, metrics)
    logging = RequestLogging.of(settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engines = EnginePool(settings, metrics, certificates=certificates)
        adapter_calls = AdapterCalls(engines, settings)
        lifecycle, threads = Lifecycle(), StoreThreads()
        registry, queue = stores(settings)
        batch_stores = batching(settings)
        parts = Parts(batch_stores.files.objects)
        index = index_requests(settings)
        log_reader = RequestLog(parts, index)
        datasets = DatasetStore(parts.store)
        recorder = None if logging is None else logging.recorder(parts, index)
        canary_store = keep_canaries(settings)
        canaries = Canaries(canary_store, settings.served_model_name, metrics)
        inference = InferenceContext(settings, engines, metrics, admission, tracer, recorder, canaries)
        suites = SuiteStore(batch_stores.files.objects)
        kept = keep_responses(settings)
        background = BackgroundResponses(kept, settings, lifecycle.closing)
        feedback = keep_feedback(settings)
        watching = CanaryController(CanaryStores(canary_store, feedback, registry), adapter_calls.sync, canaries.ended)
        idempotency = Idempotency(RedisRecords(settings))
        sessions = TrainingSessionRouter(lambda: engines.clients, settings.engine_retry_seconds)
        forge = ForgeServices(queue, engines, batch_stores.files.objects, settings.s3_bucket, threads)
        training = TrainingServices(
            settings, engines, queue, registry, suites, datasets, batch_stores.files, threads, lifecycle
        )
        runs = EvaluationStore(batch_stores.files.objects)
        erasure = Erasure(datasets, suites, runs, queue, registry, threads)
        maker = DatasetMaker(datasets, log_reader, suites)
        data = DatasetServices(maker, feedback, batch_stores.files, erasure, threads)
        learners = keep_learners(settings)
        work = LearnerWork(training, data, canary_store, runs)
        controller = LearnerController(learners, work, metrics.learners) if settings.learners else None
        tinker = TinkerServices.of(training, sessions, batch_stores.files.objects)
        queues = QueueWatch({"training": queue, "batches": batch_stores.queue}, metrics)
        sender = WebhookSender(settings, keep_webhooks(settings), metrics, registry, threads)
        adapters = AdapterServices(settings, engines, adapter_calls, registry, queue, threads, sender.store)
        directory = AdapterDirectory(adapters)
        provide(
            app,
            inference,
            lifecycle,
            idempotency,
            adapters,
            training,
            TrainingSessionServices(engines, sessions, lifecycle),
            tinker,
            ConversationSessionRouter(engines, settings.request_timeout_seconds),
            ResponseServices(kept, keep_documents(kept), BestEffortStore(kept), background),
            BatchServices.of(settings, batch_stores, threads),
            EvaluationServices(suites, runs, registry, engines, queue, datasets, threads),
            forge,
            FeedbackServices(feedback, metrics),
            CanaryServices(canary_store, registry, engines, canaries),
            RequestLogServices(log_reader, erasure, threads),
            data,
            LearnerServices(learners, work, data, training),
            HealthServices(
                inference, lifecycle, queue, queues, registry, threads, background, EngineWatch(engines, metrics.engine)
            ),
            KeyServices(keys),
            sender,
            WebhookServices(sender.store),
            LogServices(recent or RecentLogs(), engines, lifecycle, settings.keep_alive_seconds),
        )
        engines.start()
        background.start()
        tinker.samples.start()
        canaries.start()
        watching.start()
        directory.start()
        sender.start()
        if recorder is not None:
            recorder.writer.start()
        await quotas.start()
        following = None if keys is None else asyncio.create_task(keys.follow(settings.api_keys_poll_seconds))
        worker = app.state.batch_worker = BatchWorker(
            app, inference, batch_stores, threads, lifecycle, endpoints=batch_models
        )
        worker.start()
        if controller is not None:
            controller.start()
        chores: dict[str, Chore] = {"forge": partial(tidy_forge, forge), "tinker": tinker.records.tidy}
        tidying = app.state.tidying = Tidying(chores | ({"batches": worker.tidy} if settings.batch_workers > 0 else {}))
        tidying.start()
        log.info("gateway started", engines=settings.engines, model=settings.served_model_name)
        try:
            yield
        finally:
            lifecycle.stopping.set()
            lifecycle.closing.set()
            await tidying.stop()
            await directory.stop()
            await sender.stop()
            if controller is not None:
                await controller.stop()
            await worker.stop()
            if following is not None:
                await cancel_and_wait(following)
            await background.stop()
            await tinker.samples.stop()
            await watching.stop()
            await canaries.stop()
            await engines.stop()
            if recorder is not None:
                await asyncio.to_thread(recorder.writer.close, _LOG_SECONDS)
            await kept.aclose()
            await feedback.aclose()
            await canary_store.aclose()
            await learners.aclose()
            await sender.store.aclose()
            index.close()
            await quotas.stop()
            await idempotency.records.aclose()
            await queue.aclose()
            await batch_stores.queue.aclose()
            threads.close()
            audit.close()
            await asyncio.to_thread(tracer.close)
            log.info("gateway stopped")

    surfaces = (*API, dashboard_routes()) if settings.ui else API
    batch_models = {path: model for routes in API for path, model in routes.batch_models.items()}
    permissions = PermissionTable(
        [permission for routes in surfaces for permission in routes.permissions], metrics_public=settings.metrics_public
    )
    app = _Application(lifespan, permissions, needs_keys=keys is not None)
    install_error_handlers(app)
    for routes in surfaces:
        app.include_router(routes.router)
    # The last one stands outermost.
    app.add_middleware(
        BodyMemory,
        limit=settings.bodies_limit,
        largest=settings.max_body_bytes,
        seconds=settings.body_timeout_seconds,
        is_upload=_is_upload,
    )
    app.add_middleware(BodyLimit, limit=_body_limit(settings))
    app.add_middleware(BodyDecoding, limit=_body_limit(settings))
    app.add_middleware(
        Authentication,
        keys=keys,
        quotas=quotas,
        audit=audit,
        permissions=permissions,
        metrics=metrics,
        browsers=BrowserGuard(settings.hosts, settings.cors_origins),
        admission=admission,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "PUT", "DELETE"),
            allow_headers=_CORS_HEADERS,
            expose_headers=_EXPOSED_HEADERS,
        )
    app.add_middleware(HeadRequests)
    app.add_middleware(RequestContext, metrics=metrics, tracer=tracer)
    return app


class _Application(FastAPI):
    """The application with the description of its API.

    Args:
        permissions: of its routes.
        needs_keys: callers need an API key.
    """

    def __init__(self, lifespan: Lifespan[FastAPI], permissions: PermissionTable, *, needs_keys: bool) -> None:
        super().__init__(
            title="Temper",
            description=_DESCRIPTION,
            version="1",
            lifespan=lifespan,
            redirect_slashes=False,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
        )
        self._permissions = permissions
        self._needs_keys = needs_keys
        self._describing = threading.Lock()

    def openapi(self) -> dict[str, Any]:
        """The description, which is made once. That takes seconds: a thread calls this while others are served."""
        with self._describing:
            if self.openapi_schema is None:
                description = whole_bounds(super().openapi())
                add_examples(description)
                add_keys(description, self._permissions, needed=self._needs_keys)
                self.openapi_schema = description
            return self.openapi_schema


def _is_upload(scope: Scope) -> bool:
    """A body that is not read into memory: a multipart one on a route that takes one, or one that is passed on."""
    permission: Permission = scope[PERMISSION]
    multipart = Headers(scope=scope).get("content-type", "").lower().startswith("multipart/form-data")
    return permission.streams or (multipart and permission.upload)


def _body_limit(settings: GatewaySettings) -> Callable[[Scope], int]:
    """Bytes that the body of a request may have."""

    def limit(scope: Scope) -> int:
        if not _is_upload(scope):
            return settings.max_body_bytes
        return settings.max_session_bytes if scope[PERMISSION].streams else settings.max_upload_bytes

    return limit
