"""/docs: the description of the API as a page, which loads nothing from anywhere else."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

from fastapi import Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, Response

from services.gateway.api.base.routing import Routes
from services.gateway.auth.route_permissions import PUBLIC

routes = Routes("docs")

Part = Literal["swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png"]
_TYPES: dict[Part, str] = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
"""FastAPI writes the page's script into the page."""


@routes.get("/openapi.json", PUBLIC, include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """The description of the API, which is the same everywhere but for whether keys are needed."""
    return JSONResponse(request.app.openapi())


@routes.get("/docs", PUBLIC, include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Swagger UI over this gateway's own description."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{request.app.title} API",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
    )
    page.headers["content-security-policy"] = _POLICY
    return page


@routes.get("/docs/{part}", PUBLIC, include_in_schema=False)
async def docs_part(part: Part) -> Response:
    """A file of Swagger UI, which the package fastapi-swagger brings along."""
    content = files("fastapi_swagger").joinpath("resources", part).read_bytes()
    return Response(content, media_type=_TYPES[part], headers={"cache-control": "max-age=86400"})
