"""Which scope each route needs: one table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.routing import compile_path

from services.common.jobs import JOBS
from services.common.security.api_keys import Scope

_INFERENCE = frozenset({Scope.INFERENCE})
_TRAIN = frozenset({Scope.TRAIN})
_ADMIN = frozenset({Scope.ADMIN})
_WEIGHTS = _TRAIN | _ADMIN
_ATTACH = frozenset({Scope.ATTACH, Scope.ADMIN})
_ANY = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a route asks of its callers.

    ``route``: method and path, as the route is declared. ``scopes``: one of these; empty: open to everybody.
    ``audited``: calls are written to the audit log. ``generates``: refused before its body is read while the gateway is
    full. ``upload``: takes a large multipart body. ``streams``: takes a larger one, which nobody keeps. ``idempotent``:
    understands Idempotency-Key.
    """

    route: str
    scopes: frozenset[Scope]
    audited: bool = False
    generates: bool = False
    upload: bool = False
    streams: bool = False
    idempotent: bool = False

    @property
    def public(self) -> bool:
        return not self.scopes

    @property
    def path(self) -> str:
        """Template of the path, without the method."""
        return self.route.partition(" ")[2]


def _public(route: str) -> Rule:
    return Rule(route, frozenset())


def _inference(route: str, *, generates: bool = False) -> Rule:
    return Rule(route, _INFERENCE, generates=generates)


def _train(route: str, *, idempotent: bool = False) -> Rule:
    return Rule(route, _TRAIN, audited=not route.startswith("GET "), idempotent=idempotent)


def _attach(route: str) -> Rule:
    return Rule(route, _ATTACH, audited=True, idempotent=True)


def _admin(route: str, *, upload: bool = False) -> Rule:
    return Rule(route, _ADMIN, audited=True, upload=upload, idempotent=True)


RULE = "temper.rule"
"""Key of the ASGI scope: the Rule of the request."""
METRICS = "GET /metrics"
RULES: tuple[Rule, ...] = (
    # Probes have no key. The description of the API is the same everywhere, and in Temper's repository.
    _public("GET /livez"),
    _public("GET /readyz"),
    _public("GET /healthz"),
    _public("GET /health"),
    _public("GET /ping"),
    _public("POST /ping"),
    _public("GET /openapi.json"),
    _public("GET /docs"),
    _public("GET /docs/{part}"),
    _public(METRICS),
    _inference("POST /v1/chat/completions", generates=True),
    _inference("GET /v1/chat/completions"),
    _inference("GET /v1/chat/completions/{completion_id}"),
    _inference("POST /v1/chat/completions/{completion_id}"),
    _inference("DELETE /v1/chat/completions/{completion_id}"),
    _inference("GET /v1/chat/completions/{completion_id}/messages"),
    _inference("POST /v1/completions", generates=True),
    _inference("POST /v1/embeddings", generates=True),
    _inference("POST /v1/score", generates=True),
    _inference("POST /v1/messages", generates=True),
    _inference("POST /v1/messages/count_tokens"),
    Rule("POST /v1/messages/batches", _INFERENCE, idempotent=True),
    _inference("GET /v1/messages/batches"),
    _inference("GET /v1/messages/batches/{batch_id}"),
    _inference("DELETE /v1/messages/batches/{batch_id}"),
    _inference("POST /v1/messages/batches/{batch_id}/cancel"),
    _inference("GET /v1/messages/batches/{batch_id}/results"),
    _inference("POST /tokenize"),
    _inference("POST /detokenize"),
    _inference("GET /tokenizer_info"),
    _inference("POST /v1/responses", generates=True),
    _inference("POST /v1/responses/input_tokens"),
    _inference("GET /v1/responses/{response_id}"),
    _inference("DELETE /v1/responses/{response_id}"),
    _inference("POST /v1/responses/{response_id}/cancel"),
    _inference("GET /v1/responses/{response_id}/input_items"),
    _inference("POST /v1/conversations"),
    _inference("GET /v1/conversations/{conversation_id}"),
    _inference("POST /v1/conversations/{conversation_id}"),
    _inference("DELETE /v1/conversations/{conversation_id}"),
    _inference("POST /v1/conversations/{conversation_id}/items"),
    _inference("GET /v1/conversations/{conversation_id}/items"),
    _inference("GET /v1/conversations/{conversation_id}/items/{item_id}"),
    _inference("DELETE /v1/conversations/{conversation_id}/items/{item_id}"),
    Rule("POST /v1/files", _INFERENCE, upload=True),
    _inference("GET /v1/files"),
    _inference("GET /v1/files/{file_id}"),
    _inference("GET /v1/files/{file_id}/content"),
    _inference("DELETE /v1/files/{file_id}"),
    Rule("POST /v1/batches", _INFERENCE, idempotent=True),
    _inference("GET /v1/batches"),
    _inference("GET /v1/batches/{batch_id}"),
    _inference("POST /v1/batches/{batch_id}/cancel"),
    _inference("GET /v1/sessions"),
    _inference("GET /v1/sessions/{session_id:path}/export"),
    # What is imported is believed as if it had been computed here.
    Rule("PUT /v1/sessions/{session_id:path}/import", _ADMIN, audited=True, streams=True),
    _inference("POST /v1/sessions/{session_id:path}/save"),
    _inference("GET /v1/sessions/{session_id:path}"),
    _inference("DELETE /v1/sessions/{session_id:path}"),
    Rule("GET /version", _ANY),
    Rule("GET /load", _ANY),
    Rule("GET /v1/models", _ANY),
    Rule("GET /v1/models/{model:path}", _ANY),
    Rule("GET /v1/adapters", _ANY),
    _admin("POST /v1/adapters", upload=True),
    Rule("GET /v1/adapters/{name}", _ANY),
    _admin("DELETE /v1/adapters/{name}"),
    Rule("GET /v1/adapters/{name}/versions", _ANY),
    Rule("GET /v1/adapters/{name}/download", _WEIGHTS, audited=True),
    _attach("POST /v1/adapters/{name}/attach"),
    _attach("POST /v1/adapters/{name}/detach"),
    _admin("POST /v1/adapters/{name}/merge"),
    _attach("POST /v1/adapters/{name}/rollback"),
    _admin("POST /v1/adapters/{name}/prune"),
    *(Rule(f"{method} /v1/adapters/{{rest:path}}", _ANY) for method in ("GET", "POST", "PUT", "DELETE")),
    *(_train(f"POST /v1/train/{kind}", idempotent=True) for kind in JOBS),
    # Jobs of the key; of all keys for one that administrates.
    Rule("GET /v1/train/jobs", _WEIGHTS),
    Rule("GET /v1/train/jobs/{job_id}", _WEIGHTS),
    Rule("POST /v1/train/jobs/{job_id}/cancel", _WEIGHTS, audited=True),
    Rule("GET /v1/train/jobs/{job_id}/events", _WEIGHTS),
    _train("POST /v1/train/sessions", idempotent=True),
    _train("GET /v1/train/sessions"),
    _train("GET /v1/train/sessions/{session_id}"),
    _train("DELETE /v1/train/sessions/{session_id}"),
    *(
        _train(f"POST /v1/train/sessions/{{session_id}}/{call}")
        for call in ("forward_backward", "forward", "optim_step", "sample", "save", "load")
    ),
    _train("GET /v1/train/futures/{future_id}"),
)
UNKNOWN = Rule("unknown", _ANY)
"""A route that is not in the table, or no route at all: any valid key. A test keeps the table complete."""
_ROUTES = frozenset(rule.route for rule in RULES)


def is_checked(rule: Rule, method: str, path: str) -> bool:
    """Whether the rule that was applied to a request is that of the route which is about to run.

    Both are found by the request's path, and must agree on every path there is: on one that ends in a line feed, say,
    which a regular expression's $ takes for its end.
    """
    route = f"{method} {path}"
    return rule.route == route or route not in _ROUTES


class RuleBook:
    """Finds the rule of a request.

    Args:
        metrics_public: /metrics needs no key.
    """

    def __init__(self, *, metrics_public: bool = True) -> None:
        self._exact: dict[str, Rule] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Rule]] = []
        for rule in RULES:
            if rule.route == METRICS and not metrics_public:
                rule = Rule(METRICS, _ANY)
            method, path = rule.route.split(" ")
            if "{" in path:
                self._patterns.append((method, compile_path(path)[0], rule))
            else:
                self._exact[rule.route] = rule

    def find(self, method: str, path: str) -> tuple[Rule, Mapping[str, str]]:
        """The rule, and the values of the path's parameters."""
        method = "GET" if method == "HEAD" else method
        if (rule := self._exact.get(f"{method} {path}")) is not None:
            return rule, {}
        for wanted, pattern, rule in self._patterns:
            if wanted == method and (match := pattern.match(path)) is not None:
                return rule, match.groupdict()
        return UNKNOWN, {}
