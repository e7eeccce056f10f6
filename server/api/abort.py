"""POST /abort: ends a running request by the id that its answer carries."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.api.body import Body
from server.service import Service


class AbortBody(Body):
    request_id: Annotated[str, Field(min_length=1)]


async def abort(service: Service, request: Request) -> Response:
    """Tells how many sequences were ended: 0 for an id that is unknown or has ended. They answer `abort`."""
    body = await service.read_body(request, AbortBody)
    return JSONResponse({"request_id": body.request_id, "aborted": service.engine.cancel(body.request_id)})
