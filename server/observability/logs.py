"""The process's logs: as text or as JSON, one line each, with the request's id; and a line for each request."""

import json
import logging
import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config import ObservabilitySection
from server.security.guard import KEY_HOLDER, REQUEST_ID

MAX_PATH = 200
_EXTRA = ("method", "path", "status", "duration_ms", "key")

access_logger = logging.getLogger("jaxserve.access")


def configure_logging(settings: ObservabilitySection) -> None:
    """Sends every log of the process to standard error; call it once, from the command."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    access_logger.setLevel(logging.INFO if settings.access_log else logging.CRITICAL)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {"request_id": REQUEST_ID.get(), **{name: getattr(record, name, None) for name in _EXTRA}}
    return {name: value for name, value in fields.items() if value not in (None, "-")}


class JsonFormatter(logging.Formatter):
    """One object a line; JSON escapes what could break it."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True, default=str)


class TextFormatter(logging.Formatter):
    """A line to read, then `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        told = [super().formatMessage(record), *(f"{name}={value}" for name, value in _fields(record).items())]
        return " ".join(told)


class AccessLog:
    """ASGI middleware that logs each request once its answer is out; it stands inside `Identify`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not access_logger.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            access_logger.info(
                "request",
                extra={
                    "method": scope["method"],
                    # As it came over the wire: h11 lets only visible ASCII through.
                    "path": scope["raw_path"][:MAX_PATH].decode("ascii", "replace"),
                    "status": status,
                    "duration_ms": round(1000 * (time.perf_counter() - start), 1),
                    "key": KEY_HOLDER.get(),
                },
            )
