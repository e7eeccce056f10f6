"""The HTTP application: its life and its error replies; the routes stand in `server/api/routes.py`."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import DeadlineError, InvalidRequestError, QueueFullError
from jaxserve.text.tokenizer import Tokenizer
from server.api.admin import ADMIN_ENDPOINTS
from server.api.endpoint import Endpoint, Handler
from server.api.routes import ENDPOINTS
from server.config import ServerSection
from server.dashboard.routes import DASHBOARD_ENDPOINTS, OPEN_PATHS
from server.engine.engine_client import EngineClient
from server.errors import error_response, on_http_exception
from server.observability.logs import AccessLog
from server.observability.tracing import otlp_tracer
from server.security.guard import REQUEST_ID_HEADER, Guard, Identify
from server.security.keys import read_admin_keys, read_api_keys
from server.service import Service

CLIENT_CLOSED_REQUEST = 499  # nginx's name for an answer that nobody waits for any more


def create_app(async_engine: EngineClient, tokenizer: Tokenizer, limits: ServerSection | None = None) -> Starlette:
    """The application of one model. Its lifespan starts the engine, which loads while `/health` says 503.

    Raises:
      ConfigError: the keys cannot be read.
    """
    settings = limits or ServerSection()
    security = settings.security
    api_keys, admin_keys = read_api_keys(security), read_admin_keys(security)
    service = Service(engine=async_engine, tokenizer=tokenizer, limits=settings, created=int(time.time()))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async_engine.start()
        tracer = None
        if (endpoint := settings.observability.otlp_endpoint) is not None:
            tracer = otlp_tracer(endpoint)
            service.metrics.on_end = tracer.record
        try:
            yield
        finally:
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            await async_engine.close()
            service.close()

    def route(endpoint: Endpoint) -> Route:
        async def answer(request: Request) -> Response:
            return await _answer(service, endpoint.handler, request)

        return Route(endpoint.path, answer, methods=[endpoint.method])

    endpoints = [*ENDPOINTS]
    endpoints += ADMIN_ENDPOINTS if admin_keys else ()
    endpoints += DASHBOARD_ENDPOINTS if settings.dashboard else ()
    open_files = OPEN_PATHS if settings.dashboard else ()
    return Starlette(
        routes=[route(endpoint) for endpoint in endpoints],
        middleware=[
            *_cross_origin(security.cors_origins),
            Middleware(Identify),
            Middleware(AccessLog),
            Middleware(Guard, settings=settings, api_keys=api_keys, admin_keys=admin_keys, open_files=open_files),
        ],
        exception_handlers={HTTPException: on_http_exception},
        lifespan=lifespan,
    )


def _cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """Nothing unless pages of other origins may ask. It stands before the guard: a preflight request carries no key."""
    if not origins:
        return []
    headers = ["authorization", "content-type", "x-api-key", REQUEST_ID_HEADER.lower()]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=headers,
            expose_headers=[REQUEST_ID_HEADER],
        )
    ]


async def _answer(service: Service, handler: Handler, request: Request) -> Response:
    """Runs one route; whatever leaves it becomes an error of its API's shape."""
    try:
        return await handler(service, request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except (InvalidRequestError, QueueFullError, DeadlineError) as error:
        service.metrics.refuse()
        return error_response(error, request.scope["path"])
    except Exception as error:
        return error_response(error, request.scope["path"])
