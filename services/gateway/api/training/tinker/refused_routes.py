"""Requests of Tinker's SDK that are refused by name: what they are about does not exist here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.api.base.routing import AnyQueryRoute, Routes
from services.gateway.api.training.tinker.run_routes import CHECKPOINT
from services.gateway.auth.route_permissions import ANY_KEY, Permission

_REFUSED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("POST", "/api/v1/copy_weights"): (
        "copy_weights",
        "there are no projects to copy to; create_training_client_from_state goes on from any checkpoint",
    ),
    ("POST", f"{CHECKPOINT}/publish"): (
        "publish_checkpoint",
        "a sampler's weights are a version of an adapter, which every key of this server may use",
    ),
    ("DELETE", f"{CHECKPOINT}/publish"): ("unpublish_checkpoint", "checkpoints are not published here"),
    ("GET", f"{CHECKPOINT}/external_weights_urls"): (
        "get_external_weights_urls",
        "GET /v1/adapters/<name>/versions/<version>/download has the files in PEFT's format",
    ),
    ("POST", "/api/v1/create_custom_loss"): (
        "create_custom_loss",
        "losses do not run on this server; forward_backward_custom runs one in the client",
    ),
    ("POST", "/api/v1/retrieve_futures"): ("retrieve_futures", "each future is asked for by retrieve_future"),
    ("POST", "/api/v1/join_sampling_session"): (
        "join_sampling_session",
        "copies of a sampling client number their requests themselves",
    ),
    ("PUT", "/api/v1/sessions/{session_id}/project"): ("assign_session_project", "there are no projects here"),
    ("POST", "/api/v1/sessions/{session_id}/trace_export"): (
        "export_session_trace",
        "requests are traced by OpenTelemetry (TEMPER_OTLP_ENDPOINT)",
    ),
    ("POST", "/api/v1/sessions/search"): ("search_sessions", "list_sessions has the caller's sessions"),
    ("POST", "/api/v1/auth/token"): ("the exchange of API keys for tokens", "keys are sent as they are"),
    ("GET", "/api/v1/auth/apikey/me"): ("tinker auth", "`temper keys` makes and revokes keys"),
    ("DELETE", "/api/v1/auth/apikey/me"): ("tinker auth", "`temper keys` makes and revokes keys"),
    ("GET", "/api/v1/audit"): ("get_audit_log", "the audit log is the gateway's own file (TEMPER_AUDIT_LOG)"),
    ("GET", "/api/v1/billing/usage/events"): ("get_billing_usage", "nothing is billed; /metrics counts tokens by key"),
    ("GET", "/api/v1/billing/usage/checkpoints/current"): (
        "get_current_checkpoint_storage_usage",
        "nothing is billed; list_user_checkpoints has the sizes",
    ),
}

routes = Routes("tinker", route=AnyQueryRoute)


def _refusing(name: str, instead: str) -> Callable[[], Coroutine[Any, Any, None]]:
    async def refuse() -> None:
        raise InvalidRequest(f"{name} is not supported: {instead}")

    return refuse


for (_method, _path), (_name, _instead) in _REFUSED.items():
    routes.add((_method,), _path, Permission(ANY_KEY), include_in_schema=False)(_refusing(_name, _instead))
