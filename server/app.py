"""The HTTP application: routes, readiness and error replies; what a route does stands in a module of its own."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.errors import InvalidRequestError
from jaxserve.text.tokenizer import Tokenizer
from server.async_engine import AsyncEngine
from server.chat import create_chat_completion
from server.completions import create_completion
from server.config import ServerSection
from server.errors import ModelNotFoundError, error_response, on_http_exception
from server.metrics import CONTENT_TYPE
from server.service import Service

CLIENT_CLOSED_REQUEST = 499  # nginx's name for an answer that nobody waits for any more

Handler = Callable[[Service, Request], Awaitable[Response]]


def create_app(async_engine: AsyncEngine, tokenizer: Tokenizer, limits: ServerSection | None = None) -> Starlette:
    """The application of one model. Its lifespan starts the engine, which loads while `/health` says 503."""
    service = Service(
        engine=async_engine, tokenizer=tokenizer, limits=limits or ServerSection(), created=int(time.time())
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async_engine.start()
        try:
            yield
        finally:
            await async_engine.close()
            service.close()

    def route(path: str, handler: Handler, method: str) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _answer(service, handler, request)

        return Route(path, endpoint, methods=[method])

    return Starlette(
        routes=[
            route("/v1/models", list_models, "GET"),
            route("/v1/models/{model:path}", show_model, "GET"),
            route("/v1/completions", create_completion, "POST"),
            route("/v1/chat/completions", create_chat_completion, "POST"),
            route("/health", show_health, "GET"),
            route("/metrics", show_metrics, "GET"),
            route("/version", show_version, "GET"),
        ],
        exception_handlers={HTTPException: on_http_exception},
        lifespan=lifespan,
    )


async def _answer(service: Service, handler: Handler, request: Request) -> Response:
    """Runs one route; whatever leaves it becomes an answer of OpenAI's shape."""
    try:
        return await handler(service, request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except InvalidRequestError as error:
        service.metrics.count("refused")
        return error_response(error)
    except Exception as error:
        return error_response(error)


async def list_models(service: Service, _: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(service)]})


async def show_model(service: Service, request: Request) -> Response:
    model = _model(service)
    if request.path_params["model"] != model["id"]:
        raise ModelNotFoundError(request.path_params["model"], str(model["id"]))
    return JSONResponse(model)


def _model(service: Service) -> dict[str, object]:
    engine = service.engine.engine()
    return {
        "id": engine.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxserve",
        "max_model_len": engine.max_model_len,
    }


async def show_health(service: Service, _: Request) -> Response:
    """200 only while requests are taken; 503 tells why not, and how far loading has come."""
    engine = service.engine
    report: dict[str, object] = {"status": engine.state}
    if engine.state == "loading" and engine.progress is not None:
        report |= {"phase": engine.progress.phase, "done": engine.progress.done, "total": engine.progress.total}
    if engine.failure is not None:
        report["error"] = type(engine.failure).__name__
    return JSONResponse(report, 200 if engine.state == "ready" else 503)


async def show_metrics(service: Service, _: Request) -> Response:
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def show_version(_: Service, __: Request) -> Response:
    return JSONResponse({"version": package_version()})


def package_version() -> str:
    """The installed version; "unknown" where the code runs from a checkout that was never installed."""
    try:
        return version("jaxserve")
    except PackageNotFoundError:
        return "unknown"
