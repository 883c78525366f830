"""The ASGI app: routes of the page and of the HTTP API, and the form of their errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from .. import __version__
from ..view.sheet import PAGES as VIEW_PAGES
from . import docs_page
from .guard import Guard
from .inference_protocol import add_protocol_routes
from .limits import Limits
from .metrics import CONTENT_TYPE
from .models import Models
from .request import error_response
from .routes import add_image_routes
from .service import Service

STATIC = {
    "serve.css": "text/css; charset=utf-8",
    "serve.js": "text/javascript; charset=utf-8",
    "attention.js": "text/javascript; charset=utf-8",
}
PAGES = Path(__file__).parent / "pages"


def create_app(
    models: Models,
    limits: Limits | None = None,
    hosts: Sequence[str] = (),
    token: str | None = None,
) -> FastAPI:
    """Return the server as an ASGI app.

    Args:
        models: the models to serve.
        limits: limits of the server.
        hosts: host names that requests may use; empty: any.
        token: bearer token of requests, except for the page, the documentation, `/health` and `/v2/health`; None: no
            token.
    """
    service = Service(models, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="pale",
        version=__version__,
        summary="Image classification, segmentation, object detection and attention maps",
        lifespan=lifespan,
        docs_url=None,  # Swagger's page would load scripts from another site
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Guard, hosts=hosts, token=token, status=lambda: service.status)
    _add_error_handlers(app)
    add_image_routes(app, service)
    add_protocol_routes(app, service)
    _add_state_routes(app, service)
    _add_page_routes(app)
    _patch_schema(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def known(request: Request, error: HTTPException) -> Response:
        messages = {
            404: "there is no such path; see /docs",
            405: "this path does not support this method; see /docs",
        }
        message = messages.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_response(422, f"{first['loc'][-1]}: {first['msg']}")

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        message = f"the server failed ({type(error).__name__}); see its log for details"
        return error_response(500, message)


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["state"])
    async def health() -> dict[str, Any]:
        """Return the status, the models, the device and the limits of the server."""
        return service.about()

    @app.get("/metrics", tags=["state"])
    async def metrics() -> Response:
        """Return counts and times of requests, batches and queues for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _add_page_routes(app: FastAPI) -> None:
    """Add the page and its parts; they are read once, here, so that no request names a file."""
    front = _page_file("serve.html").read_text(encoding="utf-8")
    photo = _page_file("cat.jpg").read_bytes()
    headers = {"cache-control": "no-cache"}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(front, headers=headers)

    for name, media_type in STATIC.items():
        endpoint = _static_file(_page_file(name).read_bytes(), media_type, headers)
        app.add_api_route(f"/{name}", endpoint, include_in_schema=False)

    @app.get("/example", tags=["images"], response_class=Response)
    async def example() -> Response:
        """Return an example photo: Chelsea the cat, by Stéfan van der Walt, CC0."""
        return Response(photo, media_type="image/jpeg", headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page.render(app.openapi()), headers=headers)


def _page_file(name: str) -> Path:
    """Return the file of a part of the page: in this package, or shared with `pale view`."""
    own = PAGES / name
    return own if own.is_file() else VIEW_PAGES / name


def _static_file(
    content: bytes, media_type: str, headers: dict[str, str]
) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return endpoint


def _patch_schema(app: FastAPI) -> None:
    """Replace the error types of FastAPI's OpenAPI schema by the one form that all errors have."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        parts.pop("HTTPValidationError", None)
        parts.pop("ValidationError", None)
        parts["Error"] = {
            "type": "object",
            "required": ["error"],
            "properties": {"error": {"type": "string", "description": "reason of the error"}},
        }
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
