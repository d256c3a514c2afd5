"""Builds the FastAPI app: the routes, the errors in OpenAI's shape, and the registry view that polls while the app lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from adapters.errors import InternalError, InvalidRequest, LoraMuxError
from adapters.metrics import NULL_METER, Meter
from adapters.registry import Registry
from adapters.registry.keeper import keep_index
from adapters.registry.view import RegistryView
from adapters.settings import StoreSettings, WebhookSettings
from gateway import health_routes, model_routes, openai_routes, registry_routes
from gateway.backend import Backend
from gateway.catalogue import Catalogue
from gateway.documents import documented
from gateway.errors import error_body, error_headers, row_of
from gateway.promoter import Promoter
from gateway.settings import GatewaySettings
from gateway.telling import Telling
from gateway.uploads import Uploads

logger = logging.getLogger("loramux.gateway")

EXPOSED_HEADERS = (
    "x-request-id",
    "x-loramux-adapter",
    "x-loramux-tier",
    "x-loramux-load",
    "x-loramux-sticky",
    "x-loramux-digest",
    "server-timing",
    "retry-after-ms",
    "etag",
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes work with; made once. `sources` holds the credentials with which foreign addresses are read."""

    settings: GatewaySettings
    registry: Registry
    view: RegistryView
    backend: Backend
    catalogue: Catalogue
    models: model_routes.ModelLists
    telling: Telling
    promoter: Promoter
    uploads: Uploads
    sources: StoreSettings | None = None


@dataclass(frozen=True, slots=True)
class Outside:
    """What the gateway reaches beside the registry and the engines, where it is configured."""

    sources: StoreSettings | None = None
    webhook: WebhookSettings = field(default_factory=WebhookSettings)


def build_app(
    settings: GatewaySettings,
    registry: Registry,
    backend: Backend,
    *,
    poll_interval_s: float = 1.0,
    sweep_interval_s: float = 300.0,
    outside: Outside | None = None,
    meter: Meter = NULL_METER,
    on_loaded: Callable[[], None] | None = None,
) -> FastAPI:
    """The gateway as an ASGI app. Start its lifespan: the registry view polls inside it, and the index is kept in repair.

    `on_loaded` is called once, when the registry was read for the first time.
    """
    outside = outside or Outside()
    view = RegistryView(registry, poll_interval_s, meter=meter, on_change=lambda entry: promoter.notice(entry))
    catalogue = Catalogue(view)
    telling = Telling(outside.webhook, registry, meter)
    promoter = Promoter(registry, view, backend, telling)
    parts = Parts(
        settings=settings,
        registry=registry,
        view=view,
        backend=backend,
        catalogue=catalogue,
        models=model_routes.ModelLists(catalogue, backend),
        telling=telling,
        promoter=promoter,
        uploads=Uploads(settings),
        sources=outside.sources,
    )
    app = FastAPI(
        title="LoraMux",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        generate_unique_id_function=lambda route: route.name,
        lifespan=_lifespan(parts, sweep_interval_s, on_loaded),
    )
    app.state.parts = parts
    documented(app)
    for routes in (openai_routes, model_routes, registry_routes, health_routes):
        app.include_router(routes.router)
    app.add_exception_handler(LoraMuxError, _known_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _unknown_error)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED_HEADERS),
        )
    return app


def _lifespan(parts: Parts, sweep_interval_s: float, on_loaded: Callable[[], None] | None):
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        await asyncio.to_thread(parts.uploads.sweep)
        keeping = keep_index(parts.registry, sweep_interval_s)
        work = (parts.view.run(), keeping, parts.promoter.run(), _warm(parts, on_loaded))
        tasks = [asyncio.create_task(task) for task in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await parts.telling.close()

    return lifespan


async def _warm(parts: Parts, on_loaded: Callable[[], None] | None) -> None:
    """Makes the list of models once, before anybody asks: of 10,000 adapters it is the one that takes long."""
    while not parts.view.loaded:  # noqa: ASYNC110 - the view keeps no event for this one wait
        await asyncio.sleep(0.05)
    parts.models.get(False)
    if on_loaded is not None:
        on_loaded()


async def _known_error(request: Request, error: LoraMuxError) -> Response:
    return JSONResponse({"error": error_body(error)}, row_of(error).status, error_headers(error))


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
    if not field:
        found = InvalidRequest("the body is no JSON object", hint="send it with `content-type: application/json`")
    else:
        found = InvalidRequest(f"`{field[:80]}`: {first['msg']}", param=field[:80])
    return await _known_error(request, found)


async def _framework_error(request: Request, error: HTTPException) -> Response:
    """404 and 405 of the framework, in OpenAI's shape."""
    path = request.url.path[:200]
    words = {404: f"there is no route {path}", 405: f"{request.method} is not allowed on {path}"}
    body = {
        "message": words.get(error.status_code, str(error.detail)),
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_url" if error.status_code == 404 else "invalid_request",
    }
    headers = {"allow": ", ".join(sorted(_allowed(request)))} if error.status_code == 405 else error.headers
    return JSONResponse({"error": body}, error.status_code, headers)


def _allowed(request: Request) -> set[str]:
    """The methods of all routes of this path; the framework names those of the first one only."""
    found = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in found for method in getattr(route, "methods", None) or ()}


async def _unknown_error(request: Request, error: Exception) -> Response:
    logger.exception("unexpected error on %s", request.url.path, exc_info=error)
    return await _known_error(request, InternalError("something went wrong here; the log has it under the request id"))
