"""The gateway's door: who calls, may they, is there room — all before a byte of the body is read."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import Forbidden, InvalidRequest, Overloaded, TemperError, Unauthorized
from services.common.security.api_keys import TINKER_PREFIX
from services.gateway.auth.api_keys import KeyRing
from services.gateway.auth.audit_log import AuditLog
from services.gateway.auth.browsers import BrowserGuard
from services.gateway.auth.caller import ON_BEHALF_OF, UNAUTHENTICATED, UNRESTRICTED, Caller, Principal, working_for
from services.gateway.auth.route_permissions import PERMISSION, UNKNOWN, Permission, PermissionTable
from services.gateway.core.admission import Admission
from services.gateway.core.errors import response_of
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.rate_limits.limiter import Grant, RateLimiter

TIMEOUT_HEADER = "x-request-timeout-seconds"
_SAID_ONCE = ("authorization", "x-api-key", "content-type", "idempotency-key", "x-session-id", TIMEOUT_HEADER)
_SMALL_BODY = 64 * 1024


class Authentication:
    """Authenticates, checks the scope, counts against the caller's limits, refuses while the gateway is full.

    Sets ``request.state.principal``. A refused request gets its answer without its body being read.

    Args:
        keys: the valid keys; None: everybody may do everything.
        quotas: limits of the callers.
        audit: where calls that change something are written.
        permissions: what routes ask for.
        metrics: refusals.
        browsers: asked where there are no keys.
        admission: places for completions in flight.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing | None,
        quotas: RateLimiter,
        audit: AuditLog,
        permissions: PermissionTable,
        metrics: GatewayMetrics,
        browsers: BrowserGuard,
        admission: Admission,
    ) -> None:
        self._app = app
        self._keys = keys
        self._browsers = browsers
        self._admission = admission
        self._quotas = quotas
        self._audit = audit
        self._permissions = permissions
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        permission, params = self._permissions.find(scope["method"], scope["path"])
        scope[PERMISSION] = permission
        outcome = _Outcome(send)
        try:
            await self._admit(scope, permission, outcome, receive)
        except Exception:
            outcome.failed()
            raise
        finally:
            if outcome.caller is not None:
                outcome.caller.grant.release()
                outcome.caller.deadline = None
            if permission.audited:
                self._write_audit(scope, permission, params, outcome)

    async def _admit(self, scope: Scope, permission: Permission, outcome: _Outcome, receive: Receive) -> None:
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["principal"] = UNAUTHENTICATED
        try:
            _check_once(headers)
            if self._keys is None and ON_BEHALF_OF not in scope:
                self._browsers.check(scope, headers)
            principal = state["principal"] = self._principal(scope, permission, headers)
            _check_scope(permission, principal, self._metrics)
            caller = Caller(
                principal, Grant(self._quotas, principal.id, principal.limits), _deadline(permission, headers)
            )
            _check_idempotency(permission, headers)
            outcome.caller = caller
            await caller.grant.acquire()
            _check_room(permission, self._admission)
        except TemperError as error:
            await _refuse(scope, receive, outcome, headers, error)
            return
        with working_for(caller):
            await self._app(scope, receive, outcome.send)

    def _principal(self, scope: Scope, permission: Permission, headers: Headers) -> Principal:
        if permission.public:
            return UNAUTHENTICATED
        if ON_BEHALF_OF in scope:
            owner = str(scope[ON_BEHALF_OF].owner)
            return replace(UNRESTRICTED, id=owner) if self._keys is None else self._keys.owner(owner)
        if self._keys is None:
            return UNRESTRICTED
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        key = credentials.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        key = key.removeprefix(TINKER_PREFIX)
        if not key:
            self._metrics.auth_refusals.labels("missing").inc()
            raise Unauthorized(
                "this needs an API key: send it as 'Authorization: Bearer <key>', or as 'x-api-key: <key>'"
            )
        return self._keys.authenticate(key)

    def _write_audit(self, scope: Scope, permission: Permission, params: Mapping[str, str], outcome: _Outcome) -> None:
        state, client = scope["state"], scope.get("client")
        principal: Principal = state["principal"]
        target = ", ".join([*params.values(), *state.get("audit_targets", ())]) or outcome.location
        self._audit.write(
            principal=None if principal is UNAUTHENTICATED else principal.id,
            action=permission.route,
            target=target,
            status=outcome.status,
            request_id=str(state.get("request_id", "")),
            client=client[0] if client else None,
        )


class _Outcome:
    """Outcome of one request: its caller, and the status that it is answered with."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.caller: Caller | None = None
        self.status = 499
        """Status of the answer; until there is one, 499: the client went away."""
        self.location = ""
        self.started = False

    def failed(self) -> None:
        """Counts a request that failed by a bug: the middleware around answers with 500, if nothing has been answered
        yet."""
        if not self.started:
            self.status = 500

    async def send(self, message: Message) -> None:
        """Adds what the caller's limits have left."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = MutableHeaders(raw=message["headers"])
            self.location = headers.get("location", "")
            if self.caller is not None:
                headers.update(self.caller.grant.headers())
        await self._send(message)


async def _refuse(scope: Scope, receive: Receive, outcome: _Outcome, headers: Headers, error: TemperError) -> None:
    response = response_of(error, scope["path"])
    length = headers.get("content-length", "")
    small = length.isascii() and length.isdigit() and int(length[:10]) <= _SMALL_BODY
    if not small and (length or "transfer-encoding" in headers):
        response.headers["connection"] = (
            "close"  # or the server would read the body to its end, to find the next request
        )
    await response(scope, receive, outcome.send)


def _check_once(headers: Headers) -> None:
    """Raises InvalidRequest: a header that says one thing says two. Each reader would take another, or the first."""
    for name in _SAID_ONCE:
        if len(set(headers.getlist(name))) > 1:
            raise InvalidRequest(f"the header {name} is given twice, with different values: send one", param=name)


def _check_scope(permission: Permission, principal: Principal, metrics: GatewayMetrics) -> None:
    if permission.public or not permission.scopes.isdisjoint(principal.scopes):
        return
    metrics.auth_refusals.labels("scope").inc()
    needed = " or ".join(sorted(permission.scopes))
    raise Forbidden(f"the API key {principal.id} lacks the scope {needed}, which {_named(permission)} needs")


def _named(permission: Permission) -> str:
    return "every route" if permission is UNKNOWN else permission.route


def _check_idempotency(permission: Permission, headers: Mapping[str, str]) -> None:
    if (
        "idempotency-key" in headers
        and not permission.idempotent
        and not permission.route.startswith(("GET ", UNKNOWN.route))
    ):
        raise InvalidRequest(
            f"{permission.route} keeps no answers to repeat, so it cannot honour an Idempotency-Key: leave the "
            "header out",
            param="idempotency-key",
        )


def _deadline(permission: Permission, headers: Mapping[str, str]) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if text is None or not permission.generates:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
    return time.monotonic() + seconds


def _check_room(permission: Permission, admission: Admission) -> None:
    if permission.generates and admission.full:
        raise Overloaded(
            f"{admission.in_flight} completions are in flight, which is the limit: try again shortly",
            retry_after=1.0,
        )
