"""What every request passes before a route sees it: its id, its key, its rate; knows routes by their path alone."""

import re
import uuid
from collections.abc import Collection
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config import ServerSection
from server.errors import EncodingError, HeadTooLargeError, KeyMissingError, error_response
from server.observability.tracing import TRACEPARENT
from server.security.keys import KeyRing
from server.security.rate_limit import ALLOWANCE, Allowance

ADMIN_PREFIX = "/admin/"
REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# Of the request that the running task answers, for logs and spans; "-" outside of any.
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="-")
NOBODY = "-"
KEY_HOLDER: ContextVar[str] = ContextVar("KEY_HOLDER", default=NOBODY)


class Identify:
    """ASGI middleware that gives every request its id, in its answer and in the logs, and notes the trace it is of."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = valid_request_id(headers.get(REQUEST_ID_HEADER))
        REQUEST_ID.set(request_id)
        KEY_HOLDER.set(NOBODY)
        TRACEPARENT.set(headers.get("traceparent", ""))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Guard:
    """ASGI middleware that lets a request through or refuses it.

    Routes under `/admin/` ask for an admin key; all others but `open_routes` and `open_files` ask for an API key, where
    there is any. An unknown route asks for one, too: it tells nothing to a stranger.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSection,
        api_keys: KeyRing,
        admin_keys: KeyRing,
        open_files: Collection[str] = (),
    ) -> None:
        """Args: open_files: paths whose answers are the same on every server."""
        security = settings.security
        self._app = app
        self._api_keys = api_keys
        self._admin_keys = admin_keys
        self._open_routes: Collection[str] = frozenset((*security.open_routes, *open_files))
        self._max_header_bytes = settings.limits.max_header_bytes
        self._limits = (security.requests_per_minute, security.tokens_per_minute)
        self._allowances: dict[str, Allowance] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope["path"], Headers(scope=scope))
        except Exception as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, path: str, headers: Headers) -> None:
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if size > self._max_header_bytes:
            raise HeadTooLargeError(self._max_header_bytes)
        if path in self._open_routes:
            return
        is_admin = path.startswith(ADMIN_PREFIX) and bool(self._admin_keys)  # without any there are no such routes
        keys = self._admin_keys if is_admin else self._api_keys
        holder = NOBODY
        if keys:
            holder = _holder(keys, headers)
            KEY_HOLDER.set(holder)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", ""):
            raise EncodingError
        if not is_admin and self._limits != (None, None):
            allowance = self._allowances.get(holder)  # as many as there are keys
            if allowance is None:
                allowance = self._allowances[holder] = Allowance(*self._limits)
            allowance.admit()
            ALLOWANCE.set(allowance)


def valid_request_id(shown: str | None) -> str:
    """The client's own id, if it is plain enough to stand in headers and logs; else a new one."""
    if shown is not None and _REQUEST_ID.fullmatch(shown):
        return shown
    return uuid.uuid4().hex


def _holder(keys: KeyRing, headers: Headers) -> str:
    """Raises KeyMissingError unless the request shows a key, as OpenAI's clients do or as Anthropic's."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    shown = token.strip(" \t") if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # Starlette reads headers as Latin-1, so that this gives back the bytes that came, whatever they are.
    holder = keys.holder(shown.encode("latin-1"))
    if holder is None:
        raise KeyMissingError(shown=bool(shown))
    return holder
