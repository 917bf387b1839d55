"""The API: every part of it in one list, whose routes are tried in this order."""

from __future__ import annotations

from services.gateway.api.adapters import routes as adapters
from services.gateway.api.adapters import version_routes as adapter_tools
from services.gateway.api.base import docs
from services.gateway.api.base.routing import Routes
from services.gateway.api.batches import file_routes as files
from services.gateway.api.batches import routes as batches
from services.gateway.api.chat_completions import routes as chat
from services.gateway.api.chat_completions import stored_routes as stored_chats
from services.gateway.api.completions import routes as completions
from services.gateway.api.health import routes as health
from services.gateway.api.messages import batch_routes as message_batches
from services.gateway.api.messages import routes as messages
from services.gateway.api.models import routes as models
from services.gateway.api.models import tokenize
from services.gateway.api.pooling import embeddings
from services.gateway.api.pooling import score as scores
from services.gateway.api.responses import conversation_routes as conversations
from services.gateway.api.responses import routes as responses
from services.gateway.api.sessions import routes as conversation_sessions
from services.gateway.api.training import routes as training
from services.gateway.api.training_sessions import routes as training_sessions

API: tuple[Routes, ...] = (
    chat.routes,
    stored_chats.routes,
    completions.routes,
    embeddings.routes,
    scores.routes,
    responses.routes,
    conversations.routes,
    messages.routes,
    message_batches.routes,
    tokenize.routes,
    models.routes,
    adapter_tools.routes,
    adapters.routes,
    training.routes,
    training_sessions.routes,
    conversation_sessions.routes,
    files.routes,
    batches.routes,
    docs.routes,
    health.routes,
)
