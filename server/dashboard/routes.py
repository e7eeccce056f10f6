"""The live page's routes: its files, which anybody may load, and its feed, which asks for a key like all others."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from server.api.endpoint import Endpoint, Handler
from server.api.stream import EventStream
from server.dashboard.feed import Viewer
from server.service import Service

PAGE_PATH = "/dashboard"
FEED_PATH = "/dashboard/feed"
LAST = b": the end\n\n"  # a comment

_FILES = Path(__file__).parent / "static"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # Only what this server sends itself, and no script inside the page: what users write can never run.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _sends(file: Path) -> Handler:
    body = file.read_bytes()
    headers = _HEADERS | {"content-type": f"{_MEDIA_TYPES[file.suffix]}; charset=utf-8"}

    async def send_file(_: Service, __: Request) -> Response:
        return Response(body, headers=headers)

    return send_file


async def feed(service: Service, _: Request) -> Response:
    """The engine's picture, a few times a second, until the client leaves or the server closes."""
    viewer = Viewer()
    return EventStream(service.feed.watched_by(viewer), viewer.events(), last=LAST)


def _files() -> Mapping[str, Path]:
    """By the path under which they are served."""
    page = _FILES / "index.html"
    others: Iterator[Path] = (file for file in sorted(_FILES.iterdir()) if file.suffix in _MEDIA_TYPES and file != page)
    return {PAGE_PATH: page} | {f"{PAGE_PATH}/{file.name}": file for file in others}


OPEN_PATHS = frozenset(_files())  # they hold nothing of this server, and the page asks for the key
DASHBOARD_ENDPOINTS = (
    *(
        Endpoint(method="GET", path=path, handler=_sends(file), summary=f"Of the live page: {file.name}")
        for path, file in _files().items()
    ),
    Endpoint(
        method="GET", path=FEED_PATH, handler=feed, summary="What the live page shows", replies=("text/event-stream",)
    ),
)
