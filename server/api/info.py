"""What the server tells of itself: its models, its version, its load, the health of its engine, its metrics."""

from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.compilations import COMPILATIONS
from server.errors import ModelNotFoundError
from server.observability.metrics import CONTENT_TYPE
from server.service import Service


async def list_models(service: Service, _: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(service)]})


async def show_model(service: Service, request: Request) -> Response:
    model = _model(service)
    if request.path_params["model"] != model["id"]:
        raise ModelNotFoundError(request.path_params["model"], str(model["id"]))
    return JSONResponse(model)


def _model(service: Service) -> dict[str, object]:
    engine = service.engine.limits()
    return {
        "id": engine.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxserve",
        "max_model_len": engine.max_model_len,
    }


async def show_health(service: Service, _: Request) -> Response:
    """200 only while requests are taken; 503 tells why not, and how far loading has come.

    `programs_pending` counts those that `--serve-while-compiling` still adds; requests are taken meanwhile.
    """
    engine = service.engine
    report: dict[str, object] = {"status": engine.state}
    if engine.state == "loading" and engine.progress is not None:
        report |= {"phase": engine.progress.phase, "done": engine.progress.done, "total": engine.progress.total}
    if COMPILATIONS.pending:
        report["programs_pending"] = COMPILATIONS.pending
    if engine.failure is not None:
        report["error"] = type(engine.failure).__name__
    return JSONResponse(report, 200 if engine.state == "ready" else 503)


async def show_ready(service: Service, _: Request) -> Response:
    """For probes: whether to send requests here."""
    state = service.engine.state
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


async def show_live(service: Service, _: Request) -> Response:
    """200 while a restart would not help: the engine loads, serves or drains. 503 once it is dead."""
    state = service.engine.state
    return JSONResponse({"status": state}, 503 if state == "dead" else 200)


async def show_metrics(service: Service, _: Request) -> Response:
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def show_version(_: Service, __: Request) -> Response:
    return JSONResponse({"version": package_version()})


async def show_load(service: Service, _: Request) -> Response:
    """For balancers: sequences accepted and not ended, and where the engine has them."""
    stats = service.engine.stats
    return JSONResponse(
        {
            "server_load": service.engine.num_open,
            "running": 0 if stats is None else stats.num_running,
            "waiting": 0 if stats is None else stats.num_waiting,
        }
    )


def package_version() -> str:
    """The installed version; "unknown" where the code runs from a checkout that was never installed."""
    try:
        return version("jaxserve")
    except PackageNotFoundError:
        return "unknown"
