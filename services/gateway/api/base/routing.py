"""How JSON bodies are read: by the same strict parser everywhere."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import NotFound
from services.gateway.auth.route_permissions import RULE, is_checked


class _JsonRequest(Request):
    async def json(self) -> Any:
        # pydantic's parser refuses invalid UTF-8, lone surrogates and endless nesting; NaN is left to the models,
        # which name the field.
        try:
            body = await self.body()
            return from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=True)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class JsonRoute(APIRoute):
    """A route whose body is parsed by pydantic_core."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given the stricter request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if not is_checked(request.scope[RULE], request.method, self.path):
                raise NotFound(f"no such route: {request.method} {request.url.path}")
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    error: ErrorObject


def router(tag: str, *, errors: type[BaseModel] = ErrorBody) -> APIRouter:
    """A router of such routes.

    Args:
        errors: the form of their errors (services/gateway/core/errors.py).
    """
    responses: dict[int | str, dict[str, Any]] = {"default": {"model": errors}}
    return APIRouter(route_class=JsonRoute, tags=[tag], responses=responses)


def multipart(
    properties: Mapping[str, Mapping[str, Any]], required: Sequence[str], together: Sequence[str] = ()
) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a form with these parts itself.

    Args:
        together: parts that are all given, or none of them.
    """
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    if together:
        schema["dependentRequired"] = {part: [other for other in together if other != part] for part in together}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
