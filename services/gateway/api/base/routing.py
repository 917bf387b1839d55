"""Routes, and the resources of their handlers.

Each route is declared once, with its permission, and reads JSON by the same strict parser as all others. Resources are
built by the lifespan of the application, and a handler finds them by their type."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import InvalidRequest, NotFound, TemperError
from services.common.validation.json_text import RepeatedKey, parsed_json
from services.gateway.api.base.queries import QueryNames
from services.gateway.auth.route_permissions import PERMISSION, Permission
from services.gateway.inference.context import InferenceContext

T = TypeVar("T")


def provide(app: FastAPI, *resources: object) -> None:
    """Gives an application its resources, one of each type."""
    app.state.resources = {type(resource): resource for resource in resources}


def resource(app: FastAPI, kind: type[T]) -> T | None:
    """The resource of a type; None: the application was not started."""
    found = getattr(app.state, "resources", {}).get(kind)
    return found if isinstance(found, kind) else None


def resource_of(request: Request, kind: type[T]) -> T:
    """The resource of a type that serves a request.

    Raises:
        RuntimeError: the application was not started.
    """
    found = resource(request.app, kind)
    if found is None:
        raise RuntimeError(f"the application was not started: its lifespan builds the {kind.__name__}")
    return found


def provided(kind: type[Any]) -> Any:
    """Dependency of a route on a resource."""

    async def find(request: Request) -> Any:
        # A coroutine: FastAPI would run a plain function in a thread, which costs two changes of threads.
        return resource_of(request, kind)

    return Depends(find)


Inference = Annotated[InferenceContext, provided(InferenceContext)]
"""Inference context for routes that run seldom. Those of completions call ``resource_of`` instead, which saves 0.06 ms
in FastAPI."""


Handler = TypeVar("Handler", bound=Callable[..., Any])


class _JsonRequest(Request):
    async def json(self) -> Any:
        # pydantic's parser refuses invalid UTF-8, lone surrogates and endless nesting; NaN is left to the models,
        # which name the field.
        try:
            body = await self.body()
            return parsed_json(body.removeprefix(BOM_UTF8), allow_inf_nan=True)
        except RepeatedKey as error:
            raise InvalidRequest(str(error), param=error.place) from error
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class JsonRoute(APIRoute):
    """A route whose body is parsed by pydantic_core, and which refuses query parameters that it does not have.

    Routes that are open to everybody take any: probes, scrapers and browsers ask them, and there is nothing to choose.
    """

    any_query: ClassVar[bool] = False
    """Query parameters are left to the handler."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given the stricter request."""
        handler = super().get_route_handler()
        queries = QueryNames.of(self)

        async def handle(request: Request) -> Response:
            # The permission was found by the path, as this route was, and both must agree on every path. One that ends
            # in a line feed is an example where they might not: a regular expression's $ matches before it.
            permission: Permission = request.scope[PERMISSION]
            if permission.route != f"{request.method} {self.path}":
                raise NotFound(f"no such route: {request.method} {request.url.path}")
            if request.scope["query_string"] and not (self.any_query or permission.public):
                queries.check(request)
            try:
                return await handler(_JsonRequest(request.scope, request.receive))
            except HTTPException as error:
                if isinstance(error.__cause__, TemperError):  # FastAPI hides what a body raises while it is read
                    raise error.__cause__ from None
                raise

        return handle


class AnyQueryRoute(JsonRoute):
    """A route that takes any query: it refuses everything, and says why."""

    any_query = True


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    error: ErrorObject


class Routes:
    """The routes of one part of the API.

    Args:
        tag: of the routes in the API's description.
        errors: the form of their errors (services/gateway/core/errors.py).
        route: what they are made as.
    """

    def __init__(self, tag: str, *, errors: type[BaseModel] = ErrorBody, route: type[JsonRoute] = JsonRoute) -> None:
        responses: dict[int | str, dict[str, Any]] = {"default": {"model": errors}}
        self.router = APIRouter(route_class=route, tags=[tag], responses=responses)
        self.permissions: list[Permission] = []
        """Permissions of every route and method, in the order of their declaration."""
        self.batch_models: dict[str, type[BaseModel]] = {}
        """Paths whose requests may be sent in batches, with the models of their bodies."""

    def get(self, path: str, permission: Permission, **options: Any) -> Callable[[Handler], Handler]:
        """Declares a route that reads."""
        return self.add(("GET",), path, permission, **options)

    def post(
        self, path: str, permission: Permission, *, batches: type[BaseModel] | None = None, **options: Any
    ) -> Callable[[Handler], Handler]:
        """Declares a route that does something.

        Args:
            batches: the model of the body; given where batches may hold such requests.
        """
        if batches is not None:
            self.batch_models[path] = batches
        return self.add(("POST",), path, permission, **options)

    def put(self, path: str, permission: Permission, **options: Any) -> Callable[[Handler], Handler]:
        """Declares a route that replaces."""
        return self.add(("PUT",), path, permission, **options)

    def delete(self, path: str, permission: Permission, **options: Any) -> Callable[[Handler], Handler]:
        """Declares a route that removes."""
        return self.add(("DELETE",), path, permission, **options)

    def add(
        self, methods: Sequence[str], path: str, permission: Permission, **options: Any
    ) -> Callable[[Handler], Handler]:
        """Declares a route for several methods.

        Args:
            options: those of FastAPI's `add_api_route`.
        """

        def declare(handler: Handler) -> Handler:
            self.router.add_api_route(path, handler, methods=[*methods], **options)
            self.permissions += (permission.of(method, path) for method in methods)
            return handler

        return declare


def multipart(
    properties: Mapping[str, Mapping[str, Any]],
    required: Sequence[str],
    together: Sequence[str] = (),
    either: Sequence[Sequence[str]] = (),
) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a form with these parts itself.

    Args:
        together: parts that are all given, or none of them.
        either: groups of parts, all of exactly one of which are given.
    """
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    if together:
        schema["dependentRequired"] = {part: [other for other in together if other != part] for part in together}
    if either:
        schema["oneOf"] = [
            {
                "required": list(parts),
                "not": {"anyOf": [{"required": [part]} for group in either if group is not parts for part in group]},
            }
            for parts in either
        ]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
