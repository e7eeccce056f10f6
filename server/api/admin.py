"""The routes of those who run the server, under their own prefix and keys; the API's description leaves them out."""

import asyncio
from typing import Annotated

import jax
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidRequestError
from server.api.body import Body
from server.api.endpoint import Endpoint
from server.service import Service

MAX_PROFILE_S = 60


class ProfileBody(Body):
    """POST /admin/profile."""

    seconds: Annotated[float, Field(gt=0, le=MAX_PROFILE_S)]


async def abort_all(service: Service, _: Request) -> Response:
    """Ends every open sequence with reason "abort"; tells how many there were."""
    aborted = service.engine.num_open
    service.engine.abort_all()
    return JSONResponse({"aborted": aborted})


async def show_pages(service: Service, _: Request) -> Response:
    """The engine's counts, the page ledger, and what was found where they do not agree with each other."""
    return JSONResponse(await service.engine.pages())


async def flush(service: Service, _: Request) -> Response:
    """Forgets every cached page; running requests keep theirs."""
    return JSONResponse({"pages": await service.engine.flush()})


async def profile(service: Service, request: Request) -> Response:
    """Records what the device and the host do for a while, for XProf or Perfetto; the traffic goes on."""
    body = await service.read_body(request, ProfileBody)
    folder = service.limits.security.profile_folder
    if folder is None:
        raise InvalidRequestError("no folder is set to write to (server.security.profile_folder)")
    if service.is_profiling:
        raise InvalidRequestError("a profile is being recorded already")
    service.is_profiling = True
    try:
        await asyncio.to_thread(jax.profiler.start_trace, folder)
        try:
            await asyncio.sleep(body.seconds)
        finally:
            await asyncio.to_thread(jax.profiler.stop_trace)
    finally:
        service.is_profiling = False
    return JSONResponse({"seconds": body.seconds})


ADMIN_ENDPOINTS = (
    Endpoint(method="POST", path="/admin/flush", handler=flush, summary="Forgets every cached page"),
    Endpoint(method="POST", path="/admin/abort-all", handler=abort_all, summary="Ends every open request"),
    Endpoint(method="GET", path="/admin/pages", handler=show_pages, summary="What the pages hold"),
    Endpoint(method="POST", path="/admin/profile", handler=profile, body=ProfileBody, summary="Records a profile"),
)
