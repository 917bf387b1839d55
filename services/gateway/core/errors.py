"""Error bodies: what each exception becomes, in one place.

Every answer that is not a success has OpenAI's form `{"error": {"message", "type", "param", "code"}}`; under
/v1/messages it has Anthropic's, `{"type": "error", "error": {"type", "message", "details"}}`, and under /api/v1, which
is Tinker's, `{"detail", "category", "code", "param"}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from services.common.errors import (
    AdapterRejected,
    CheckpointRejected,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    DoesNotFit,
    Forbidden,
    Gone,
    InProgress,
    InvalidRequest,
    ModelNotFound,
    NewerSchema,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    TemperError,
    Unauthorized,
    Unavailable,
    nothing_left,
)
from services.common.pb import engine_pb2
from services.common.validation.errors import Told, dotted, most_telling

log = structlog.get_logger(__name__)

_STATUS: tuple[tuple[type[TemperError], int], ...] = (
    (InvalidRequest, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (RateLimited, 429),
    (PayloadTooLarge, 413),
    (Gone, 410),
    (NotFound, 404),
    (Conflict, 409),
    (AdapterRejected, 422),
    (CheckpointRejected, 422),
    (NewerSchema, 503),
    (Overloaded, 503),
    (Unavailable, 503),
    (DeadlineExceeded, 504),
)
_HTTP_CODES = {
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
    503: "overloaded",
}
_FROM_ENGINE: Mapping[int, type[TemperError]] = {
    engine_pb2.ERROR_CODE_ADAPTER_REJECTED: AdapterRejected,
    engine_pb2.ERROR_CODE_DEADLINE_EXCEEDED: DeadlineExceeded,
    engine_pb2.ERROR_CODE_NOT_FOUND: NotFound,
    engine_pb2.ERROR_CODE_CONFLICT: Conflict,
    engine_pb2.ERROR_CODE_GONE: Gone,
    engine_pb2.ERROR_CODE_DOES_NOT_FIT: DoesNotFit,
}
_MESSAGES = "/v1/messages"
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_TINKER = "/api/v1/"
_FOR_TINKER: Mapping[int, int] = {409: 400}
"""Statuses that Tinker's SDK takes for passing trouble, and asks again for minutes."""
_LONGEST_PATH = 200
"""Characters that are told of a path that has no route."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that went away; only logs and metrics see it."""


class ClientDisconnected(Exception):
    """The client closed the connection: nobody waits for the answer."""


def status_of(error: TemperError) -> int:
    """HTTP status of an error; 500 for one that is not in the table."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def in_anthropic_form(route: str) -> bool:
    """True if clients of this path are Anthropic's, which expect errors in the form of its API."""
    return route == _MESSAGES or route.startswith(f"{_MESSAGES}/")


def in_tinker_form(route: str) -> bool:
    """True if clients of this path are Tinker's."""
    return route.startswith(_TINKER)


def error_payload(
    message: str, *, status: int, code: str | None, param: str | None = None, route: str = ""
) -> dict[str, Any]:
    """The error body, in the form that the clients of ``route`` read."""
    if in_tinker_form(route):
        category = "server" if status >= 500 or status in (408, 429) else "user"
        return {"detail": message, "category": category, "code": code, "param": param}
    if in_anthropic_form(route):
        return _anthropic_payload(message, status, code, param)
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _anthropic_payload(message: str, status: int, code: str | None, param: str | None) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if code == Overloaded.code:
        kind = "overloaded_error"  # what Anthropic sends with its own status 529
    # anthropic-python reads `details.error_code`: a stable name of the cause.
    details = {"error_code": code, "param": param}
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}}


def payload_of(error: Exception, route: str = "") -> dict[str, Any]:
    """Error body of any exception; an unexpected one shows nothing of itself."""
    told = error if isinstance(error, TemperError) else told_of(error)
    return error_payload(told.message, status=status_of(told), code=told.code, param=told.param, route=route)


def told_of(error: Exception) -> TemperError:
    """The error that is told of an unexpected one: a bug shows nothing of itself, and a process that gets no memory,
    thread or file handle says that it is busy, as it is for a while."""
    if nothing_left(error):
        return Overloaded("the gateway has no memory, thread or file handle left for this request: try again shortly")
    return TemperError("internal error; the log has the details")


def error_response(
    message: str,
    *,
    status: int,
    code: str | None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    route: str = "",
) -> Response:
    """A JSON response with the error body that the clients of ``route`` read."""
    body = to_json(error_payload(message, status=status, code=code, param=param, route=route))
    return Response(body, status, headers=dict(headers or {}), media_type="application/json")


def response_of(error: TemperError, route: str) -> Response:
    """The answer to a request to ``route`` that failed with ``error``."""
    headers = {}
    if isinstance(error, Overloaded | Unavailable | RateLimited | InProgress):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="temper"'
    status = status_of(error)
    if in_tinker_form(route):
        # Its SDK slows down at 429; at 503 it does not.
        status = 429 if isinstance(error, Overloaded) else _FOR_TINKER.get(status, status)
    return error_response(
        error.message, status=status, code=error.code, param=error.param, headers=headers, route=route
    )


def engine_error(error: engine_pb2.Error) -> TemperError:
    """The exception that an engine's error stands for."""
    message, param = error.message or "the engine gave no reason", error.param or None
    match error.code:
        case engine_pb2.ERROR_CODE_INVALID_REQUEST:
            return InvalidRequest(message, param=param)
        case engine_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED:
            return ContextLengthExceeded(message, param=param)
        case engine_pb2.ERROR_CODE_MODEL_NOT_FOUND:
            return ModelNotFound(message, param=param or "model")
        case engine_pb2.ERROR_CODE_OVERLOADED:
            return Overloaded(message)
        case engine_pb2.ERROR_CODE_UNAVAILABLE:
            return Unavailable(message, retry_after=1.0)
        case _:
            return _FROM_ENGINE.get(error.code, TemperError)(message, param=param)


def _describe(told: Told, name: str) -> tuple[str, str]:
    """Message and code of one pydantic error."""
    error, kind, text = told.error, str(told.error["type"]), told.words
    if kind == "json_invalid":
        return f"the body is not valid JSON: {error.get('ctx', {}).get('error', text)}", "invalid_json"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"Unknown parameter: {name!r}. It is not part of this API: check its spelling or remove it.", (
            "unknown_parameter"
        )
    if kind == "missing":
        return f"Missing required parameter: {name!r}.", "missing_required_parameter"
    if kind == "unsupported":
        return text, str(error["ctx"]["code"])
    if kind == "contradiction":
        return text, "invalid_value"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return f"{name}: {text}" if name else text, code


def _complaint(errors: Sequence[Mapping[str, Any]], body: Any, model: Any) -> tuple[str, str, str | None]:
    """Message, code and field of the error that says most."""
    told = most_telling(errors, body)
    if told is None:
        return "the request is not valid", InvalidRequest.code, None
    error, path = told.error, told.path
    name = dotted(path)
    if not path and error["type"] not in ("json_invalid", "missing") and not isinstance(body, Mapping):
        return "send a JSON object with the header 'content-type: application/json'", "invalid_json", None
    if not path and error["type"] == "missing":
        return "the request body is missing", "missing_required_parameter", None
    if told.unknown and model is not None and (meant := told.suggestion(model, body)):
        return f"Unknown parameter: {name!r}{meant}", "unknown_parameter", name
    message, code = _describe(told, name)
    if not path and error["type"] == "value_error" and model is not None:
        name = told.named(model, body) or ""
    return message, code, name or None


def validation_response(errors: Sequence[Mapping[str, Any]], body: Any, route: str, *, model: Any = None) -> Response:
    """400 for a request to ``route`` that does not fit its model.

    Args:
        model: of the body, whose fields a misspelt one is compared with.
    """
    message, code, param = _complaint(errors, body, model)
    return error_response(message, status=400, code=code, param=param, route=route)


def _route(request: Request) -> str:
    return str(request.scope["path"])


async def _on_temper_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, TemperError):
        raise error
    if status_of(error) == 500:
        log.error("request failed", error=error.message)
    return response_of(error, _route(request))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return validation_response(error.errors(), error.body, _route(request), model=_body_model(request))


def _body_model(request: Request) -> Any:
    """The type of the body of the route that was asked; None where there is none."""
    field = getattr(request.scope.get("route"), "body_field", None)
    return None if field is None else field.field_info.annotation


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    status = error.status_code
    message = str(error.detail)
    if status == 404:
        message = f"no such route: {request.method} {request.url.path[:_LONGEST_PATH]}"
    elif status == 405:
        message = f"{request.method} is not allowed on {request.url.path[:_LONGEST_PATH]}"
    code = _HTTP_CODES.get(status, "invalid_request" if status < 500 else "internal_error")
    return error_response(message, status=status, code=code, headers=error.headers, route=_route(request))


async def _on_disconnect(_: Request, error: Exception) -> Response:
    if not isinstance(error, ClientDisconnected | ClientDisconnect):
        raise error
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def install_error_handlers(app: FastAPI) -> None:
    """Registers the mapping for everything that a handler may raise."""
    app.add_exception_handler(TemperError, _on_temper_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnected, _on_disconnect)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
