"""Which body an error has: decided by the route, in one place."""

from __future__ import annotations

import json

import anthropic
import pytest

from services.common.errors import (
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PayloadTooLarge,
    TemperError,
    Unavailable,
)
from services.gateway.core.errors import error_payload, payload_of, response_of
from services.gateway.protocol.messages.response import AnthropicErrorBody

ERRORS = [
    (InvalidRequest("m", param="p"), 400, "invalid_request_error"),
    (ContextLengthExceeded("m"), 400, "invalid_request_error"),
    (PayloadTooLarge("m"), 413, "invalid_request_error"),
    (ModelNotFound("m", param="model"), 404, "not_found_error"),
    (Conflict("m"), 409, "invalid_request_error"),
    (Overloaded("m"), 503, "overloaded_error"),
    (Unavailable("m"), 503, "api_error"),
    (DeadlineExceeded("m"), 504, "timeout_error"),
    (TemperError("m"), 500, "api_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
def test_of_messages(error: TemperError, status: int, kind: str, route: str) -> None:
    response = response_of(error, route)
    assert response.status_code == status
    body = AnthropicErrorBody.model_validate_json(bytes(response.body), strict=True)
    assert (body.error.type, body.error.message) == (kind, "m")
    assert (body.error.details.error_code, body.error.details.param) == (error.code, error.param)
    anthropic.types.ErrorResponse.model_validate_json(bytes(response.body), strict=True)


@pytest.mark.parametrize("route", ["", "/", "/v1/messagesX", "/v1/models", "/v1/chat/completions", "/V1/MESSAGES"])
def test_of_all_others(route: str) -> None:
    body = json.loads(bytes(response_of(ModelNotFound("m", param="model"), route).body))
    assert body == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
    ],
)
def test_by_status(status: int, kind: str) -> None:
    assert error_payload("m", status=status, code=None, route="/v1/messages")["error"]["type"] == kind


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/models"])
def test_a_bug_shows_nothing_of_itself(route: str) -> None:
    assert "secret" not in json.dumps(payload_of(ValueError("secret /tmp/x.py"), route))
