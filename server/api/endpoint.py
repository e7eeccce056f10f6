"""One route of the API as data: what the application serves and what `/openapi.json` describes is the same table."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from server.api.body import Body
from server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]
Reply = Literal["application/json", "text/event-stream", "text/plain", "text/html"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A route.

    Attributes:
      path: as Starlette has it; `{name:path}` takes slashes, too.
      summary: one line for the docs page; its group is the path's first part that is no version.
      body: what it reads, or each of the forms; None where it reads nothing.
      replies: content types of a good answer.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    summary: str
    body: type[Body] | tuple[type[Body], ...] | None = None
    replies: tuple[Reply, ...] = ("application/json",)
