"""Sends server-sent events, and ends work whose client has left; knows no field of what it sends."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from json.encoder import encode_basestring
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.errors import describe

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back until a buffer is full
]


def event(payload: Mapping[str, Any]) -> bytes:
    """One event; JSON escapes line breaks, so the payload is always one line."""
    return b"data: " + _ENCODER.encode(payload).encode() + b"\n\n"


class TextEvent:
    """Events that differ in one text only, nearly all of a stream's: everything around it is rendered once."""

    PLACE = "\0"  # stands for the text; what comes before it may not hold one

    def __init__(self, example: bytes) -> None:
        """Args: example: an event whose text is PLACE."""
        self._before, place, self._after = example.partition(_ENCODER.encode(self.PLACE).encode())
        assert place, example

    def __call__(self, text: str) -> bytes:
        return self._before + encode_basestring(text).encode() + self._after


def typed_event(kind: str, payload: Mapping[str, Any]) -> bytes:
    """One event that carries its type both in SSE's own field and in its JSON."""
    return f"event: {kind}\n".encode() + event({"type": kind, **payload})


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; cancels it when the client goes away first.

    Call it once the request's body is read: the next message is then the disconnect.

    Raises:
      ClientDisconnect: the client left; `work` has ended, its `finally` blocks included.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for unfinished in (task, watch):
            unfinished.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the events of an async generator as they come, then `[DONE]`.

    An error after the headers cannot change the status any more: it becomes an event of its own, OpenAI's `error`
    object, and no `[DONE]` follows. When the client leaves, the generator is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, run: AbstractContextManager[Any], events: AsyncGenerator[bytes], *, last: bytes = DONE) -> None:
        """
        Args:
          run: left when the stream ends, however it ends, even before the first event was asked for.
          last: what follows the events, unless they end with an error.
        """
        self._last = last
        self._run = run
        self._events = events
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._run, suppress(ClientDisconnect):  # a client that left needs no answer
            await run_until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = self._last
            except Exception as error:
                last = event(describe(error).body())
            await send({"type": "http.response.body", "body": last, "more_body": False})


class Making(Protocol):
    """One answer while it is made, in its route's shape; one of the two is called, once."""

    def events(self) -> AsyncGenerator[bytes]: ...

    async def whole(self) -> Mapping[str, Any]: ...


async def answer(
    request: Request, run: AbstractContextManager[Any], making: Making, *, is_stream: bool, last: bytes = DONE
) -> Response:
    """Sends what is made of a run as it comes, or all at once; the run is left when it ends, however it ends."""
    if is_stream:
        return EventStream(run, making.events(), last=last)
    with run:
        return JSONResponse(await run_until_disconnect(request.receive, making.whole()))
