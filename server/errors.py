"""Maps every exception to a status of HTTP and gRPC and to an error body; the one place that knows them."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    JaxserveError,
    QueueFullError,
    RequestFailedError,
    TenantLimitError,
)
from server.engine.engine_client import UnavailableError
from server.security.rate_limit import RateLimitError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5
ANTHROPIC_ROUTES = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Status, type and code of what is no fault of the request; of a class and one above it the first counts.
_REPLIES: dict[type[JaxserveError], tuple[int, str, str]] = {
    TenantLimitError: (429, "rate_limit_error", "tenant_limit"),
    QueueFullError: (503, "service_unavailable_error", "queue_full"),
    DeadlineError: (503, "service_unavailable_error", "deadline"),
    UnavailableError: (503, "service_unavailable_error", "unavailable"),
    EngineDeadError: (500, "server_error", "engine_dead"),
    RequestFailedError: (500, "server_error", "request_failed"),
}
MAX_SHOWN = 80  # characters of what a client sent that an error repeats
MAX_MESSAGE_CHARS = 2000  # of a refusal: a template's own words may hold the whole conversation

_GRPC_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


class HttpRefusal(InvalidRequestError):
    """A refusal for which HTTP has a status of its own."""

    status: ClassVar[int]


class ModelNotFoundError(HttpRefusal):
    status = 404

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(
            f"the model {asked[:MAX_SHOWN]!r} does not exist; this server serves {served!r}",
            param="model",
            code="model_not_found",
        )


class NotFoundError(HttpRefusal):
    status = 404


class BodyTooLargeError(HttpRefusal):
    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is longer than {limit} bytes (server.max_body_bytes)", code="body_too_large")


class MediaTypeError(HttpRefusal):
    status = 415

    def __init__(self, media_type: str) -> None:
        super().__init__(
            f"the content type is {media_type[:MAX_SHOWN]!r}; send application/json", code="unsupported_media_type"
        )


class BodyTimeoutError(HttpRefusal):
    status = 408

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"the body did not come within {limit_s:g} s (server.limits.body_timeout_s)", code="body_timeout"
        )


class HeadTooLargeError(HttpRefusal):
    status = 431

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the headers are longer than {limit} bytes (server.limits.max_header_bytes)", code="headers_too_large"
        )


class EncodingError(HttpRefusal):
    """A compressed body: its length says nothing of what it unpacks to."""

    status = 415

    def __init__(self) -> None:
        super().__init__("compressed bodies are not taken; send none of Content-Encoding", code="unsupported_encoding")


class KeyMissingError(HttpRefusal):
    status = 401

    def __init__(self, *, shown: bool) -> None:
        super().__init__(
            "this API key is unknown" if shown else "an API key is needed, as Authorization: Bearer KEY",
            code="invalid_api_key",
        )


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The engine's or the template's refusal, naming the fields that a route has in place of theirs."""
    param = error.param if error.param is None else names.get(error.param, error.param)
    return InvalidRequestError(error.message, param=param, code=error.code)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorReply:
    """One error as a client sees it."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self, path: str = "") -> dict[str, Any]:
        """OpenAI's error object, or Anthropic's on the routes that speak its API."""
        if path.startswith(ANTHROPIC_ROUTES):
            kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            # Its form has no field for the parameter, so the message leads with it.
            message = self.message if self.param is None else f"{self.param}: {self.message}"
            return {"type": "error", "error": {"type": kind, "message": message}}
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class RemoteError(JaxserveError):
    """What an engine in another process answered; it goes on to the client as it is."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply


def grpc_code(reply: ErrorReply) -> grpc.StatusCode:
    """The gRPC status that says the same as the HTTP one."""
    if reply.code == "deadline":
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return _GRPC_CODES.get(
        reply.status, grpc.StatusCode.INVALID_ARGUMENT if reply.status < 500 else grpc.StatusCode.INTERNAL
    )


def describe(error: Exception) -> ErrorReply:
    """Chooses status and body. An error that nobody foresaw becomes a 500 that tells nothing of the inside."""
    if isinstance(error, InvalidRequestError):
        status = error.status if isinstance(error, HttpRefusal) else 400
        message = error.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "…"
        return ErrorReply(
            status=status, message=message, kind="invalid_request_error", param=error.param, code=error.code
        )
    if isinstance(error, RateLimitError):
        return ErrorReply(
            status=429,
            message=str(error),
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, RemoteError):
        return error.reply
    for kind_of_error, (status, kind, code) in _REPLIES.items():
        if isinstance(error, kind_of_error):
            retry_after_s = RETRY_AFTER_S if status in (429, 503) else None
            return ErrorReply(status=status, message=str(error), kind=kind, code=code, retry_after_s=retry_after_s)
    logger.error("a request failed on an error of the server's own", exc_info=error)
    return ErrorReply(
        status=500,
        message="the server failed on this request; its log has the cause",
        kind="server_error",
        code="internal_error",
    )


def error_response(error: Exception, path: str) -> Response:
    """The whole answer for an exception that left the route of this path."""
    reply = describe(error)
    headers = {}
    if reply.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(reply.retry_after_s)))
    if reply.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(reply.body(path), reply.status, headers)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route (404), wrong method (405)."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    route = f"{request.method[:MAX_SHOWN]} {path[:MAX_SHOWN]}"
    message = {404: f"{route}: no such route", 405: f"{route}: wrong method"}.get(error.status_code, error.detail)
    code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code)
    reply = ErrorReply(status=error.status_code, message=message, kind="invalid_request_error", code=code)
    return JSONResponse(reply.body(path), reply.status, error.headers)
