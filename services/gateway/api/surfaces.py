"""The API: every part of it in one list, whose routes are tried in this order."""

from __future__ import annotations

from services.gateway.api import models, pooling, sessions
from services.gateway.api.adapters import dynamic_routes as dynamic_adapters
from services.gateway.api.adapters import routes as adapters
from services.gateway.api.adapters import version_routes as adapter_versions
from services.gateway.api.base import openapi
from services.gateway.api.base.routing import Routes
from services.gateway.api.batches import files
from services.gateway.api.batches import routes as batches
from services.gateway.api.completions import chat_completions, stored_chats, text_completions, tokenize
from services.gateway.api.evaluation import contamination, harness, runs, side_by_side, suites
from services.gateway.api.learning import canaries, datasets, feedback, learners, request_log
from services.gateway.api.messages import batches as message_batches
from services.gateway.api.messages import routes as messages
from services.gateway.api.operations import health, keys, logs, pause, sleep, status, webhooks
from services.gateway.api.responses import conversations
from services.gateway.api.responses import routes as responses
from services.gateway.api.training import forge
from services.gateway.api.training import routes as training
from services.gateway.api.training import sessions as training_sessions
from services.gateway.api.training.fine_tuning import routes as fine_tuning
from services.gateway.api.training.tinker import (
    future_routes,
    refused_routes,
    run_routes,
    service_routes,
    training_routes,
)

API: tuple[Routes, ...] = (
    tokenize.routes,  # in front of those of one stored chat, whose id "render" looks like
    chat_completions.routes,
    stored_chats.routes,
    text_completions.routes,
    pooling.embedding_routes,
    pooling.score_routes,
    responses.routes,
    conversations.routes,
    messages.routes,
    message_batches.routes,
    models.routes,
    adapter_versions.routes,
    side_by_side.routes,  # in front of those of one run, whose id it looks like
    runs.routes,  # some are below /v1/adapters, whose routes take the rest
    adapters.routes,
    dynamic_adapters.routes,
    training.routes,
    training_sessions.routes,
    service_routes.routes,
    training_routes.routes,
    future_routes.routes,
    refused_routes.routes,
    run_routes.routes,
    fine_tuning.routes,
    suites.routes,
    contamination.routes,
    forge.routes,
    harness.routes,
    feedback.routes,
    request_log.routes,
    datasets.routes,
    canaries.routes,
    learners.routes,
    sessions.routes,
    files.routes,
    batches.routes,
    openapi.routes,
    health.routes,
    status.routes,
    sleep.routes,
    keys.routes,
    logs.routes,
    pause.routes,
    webhooks.routes,
)
