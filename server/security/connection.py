"""One HTTP connection with limits in time and number, so that a slow client costs a socket for a while and no more."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.config import LimitsSection

LINGER_S = 2.0  # for a client that still sends a body whose answer is out: closing at once could lose it the answer


def bounded_protocol(limits: LimitsSection) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1 protocol under `limits`."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})


class BoundedProtocol(H11Protocol):
    """Gives up on clients that do not send their request's head, or do not read what they asked for.

    The time that a body may take is the route's to watch, which can answer; here nothing has been asked yet, or
    nobody listens.
    """

    limits: LimitsSection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._read_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self.conn.their_state is h11.IDLE:
            self._await_head()  # the first bytes of the next request on a connection that was kept
        super().data_received(data)
        if self._head_timer is not None and self.conn.their_state is not h11.IDLE:
            self._head_timer.cancel()
            self._head_timer = None
        if self._linger_timer is not None and self.conn.their_state is not h11.SEND_BODY:
            self._linger_timer.cancel()  # the whole body came, and the connection may serve the next request
            self._linger_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self.limits.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer is under way already
            self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.abort)
