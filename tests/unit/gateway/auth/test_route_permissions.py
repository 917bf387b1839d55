"""Every route has its scope, and no spelling of a path is a way around it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route, compile_path

from services.gateway.api.surfaces import API
from services.gateway.auth.route_permissions import UNKNOWN, PermissionTable
from services.gateway.core.batch_queue import MESSAGES, Endpoint
from services.gateway.server.app import create_app
from services.gateway.settings import GatewaySettings
from services.gateway.ui.routes import dashboard_routes
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.key_file import Keys, error_of


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/v1/chat/completions", "inference"),
        ("POST", "/v1/train/sft", "train"),
        ("GET", "/v1/train/sessions", "train"),
        ("POST", "/v1/adapters", "admin"),
        ("DELETE", "/v1/adapters/bot", "admin"),
        ("POST", "/v1/adapters/bot/merge", "admin"),
    ],
)
def test_a_missing_scope_is_named(door: httpx.Client, keys: Keys, method: str, path: str, scope: str) -> None:
    for other in {"inference", "train", "admin"} - {scope}:
        error = error_of(door.request(method, path, json={}, headers=keys.bearer(other)), 403)
        assert f"lacks the scope {scope}," in error["message"]
        assert keys.entries[other].id in error["message"]
    assert door.request(method, path, json={}, headers=keys.bearer(scope)).status_code not in (401, 403)


def test_open_routes(door: httpx.Client, keys: Keys) -> None:
    for path in ("/livez", "/readyz", "/healthz", "/openapi.json", "/docs"):
        assert door.get(path).status_code == 200
    assert error_of(door.get("/metrics"), 401), "TEMPER_METRICS_PUBLIC is off here"
    assert "temper_gateway_api_keys" in door.get("/metrics", headers=keys.bearer("inference")).text


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """A gateway that asks for no keys."""
    return create_app(GatewaySettings())


def test_the_description_names_keys_and_scopes(door: httpx.Client, app: FastAPI) -> None:
    described = door.get("/openapi.json").json()
    assert set(described["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    attach = described["paths"]["/v1/adapters/{name}/attach"]["post"]
    assert attach["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "Scope of the API key: `admin` or `attach`." in attach["description"]
    assert described["paths"]["/livez"]["get"]["security"] == []
    without_keys = app.openapi()["paths"]["/v1/models"]["get"]
    assert without_keys["security"][0] == {}


def _routes(candidates: Any) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, those of included routers too."""
    for candidate in candidates:
        if hasattr(candidate, "effective_candidates"):
            yield from _routes(candidate.effective_candidates())
            continue
        route = getattr(candidate, "original_route", candidate)
        assert isinstance(route, Route), route
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, route.path


PERMISSIONS = [permission for routes in (*API, dashboard_routes()) for permission in routes.permissions]


def test_every_route_has_a_permission(app: FastAPI) -> None:
    """A route that does not come from a list of the API has none, and would be open to every key."""
    routes = [f"{method} {path}" for method, path in _routes(app.routes)]
    assert len(routes) > 30
    assert sorted(routes) == sorted(permission.route for permission in PERMISSIONS), "declare them with Routes"
    assert len(routes) == len(set(routes))
    described = {
        f"{method.upper()} {path}" for path, operations in app.openapi()["paths"].items() for method in operations
    }
    assert described <= {permission.route.replace(":path}", "}") for permission in PERMISSIONS}


def test_a_path_gets_the_permission_of_its_route(app: FastAPI) -> None:
    """The table is searched in its own way: it must find what the router would run."""
    table = PermissionTable(PERMISSIONS)
    for method, path in _routes(app.routes):
        _, template, convertors = compile_path(path)
        values = {name: "no/such/path" if name == "rest" else f"some-{name}" for name in convertors}
        permission, params = table.find(method, template.format(**values))
        assert permission.route == f"{method} {path}"
        assert params == values
    assert table.find("GET", "/v1/nothing")[0] is UNKNOWN
    assert table.find("PATCH", "/v1/adapters/bot")[0] is UNKNOWN
    assert table.find("HEAD", "/livez")[0].public
    assert not table.find("GET", "/livez/")[0].public
    assert not table.find("POST", "/livez")[0].public


def test_what_a_route_asks_for_changes_on_purpose_only() -> None:
    """Who may do what without a key of its own scope, and what the audit log has."""
    public = {permission.route for permission in PERMISSIONS if permission.public}
    assert public == {
        *(f"GET /{path}" for path in ("livez", "readyz", "healthz", "health", "ping", "metrics")),
        "POST /ping",
        "GET /openapi.json",
        "GET /docs",
        "GET /docs/{part}",
        *(f"GET /ui{path}" for path in ("", "/", "/assets/{digest}/{name:path}")),
    }
    for permission in PERMISSIONS:
        changes = not permission.route.startswith("GET ")
        if changes and permission.scopes & {"train", "admin", "attach"} and "inference" not in permission.scopes:
            assert permission.audited, permission.route


def test_batches_hold_requests_of_the_routes_that_say_so() -> None:
    assert {path for routes in API for path in routes.batch_models} == {*get_args(Endpoint), MESSAGES}


@pytest.mark.parametrize("name", ["inference", "train", None])
def test_no_spelling_of_a_path_is_a_way_around_its_scope(guarded: Running, keys: Keys, name: str | None) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    key = "" if name is None else f"authorization: Bearer {keys.secrets[name]}\r\n"
    for path in (
        "/v1/adapters%0A",
        "/v1/adapters%0a",
        "/v1/adapters?x=/livez",
        "/v1/adapters/bot/attach%0A",
        "/v1/%61dapters",
        "//v1/adapters",
        "/livez/../v1/adapters",
        "/v1/adapters/",
        "/v1/adapters%00",
        "/v1/adapters;x",
        "http://x/v1/adapters",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{key}connection: close\r\ncontent-length: 0\r\n\r\n"
            connection.sendall(head.encode())
            received = b""
            while part := connection.recv(65536):
                received += part
        status = int(received.split()[1])
        assert status == 401 if name is None else status in (400, 403, 404, 405), (path, received)
        if status == 400:
            assert b"adapter name" in received, "the route that refuses names with a slash"
