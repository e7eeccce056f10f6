"""HTTP/1.1 for a load generator: h11 over asyncio's transports, every arrival stamped; knows nothing of what is sent.

A general client can spend more on a request than the server under test: httpx could not send 500 a second. h11, which
httpx and uvicorn bring along, does the protocol here; connections, their reuse and the stamps are all that is left.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import h11

from server.bench.errors import BenchError

# Servers close connections that idle for 5 s and more; one that is never older than this is not closed under a request.
REUSE_WITHIN_S = 2.0
MAX_REPLY_BYTES = 16 << 20  # of a whole reply that is read by `fetch`


class ConnectError(Exception):
    """There is no connection."""


class ClosedError(Exception):
    """The connection ended before the reply did."""


class ProtocolError(Exception):
    """What came is no HTTP."""


class Exchange:
    """One request and its reply.

    Attributes:
      done: what ended it: None if the reply is complete, else a ClosedError or a ProtocolError.
      sent_time, head_time, last_time: the event loop's time of sending, of the status line and of the last bytes.
      on_body: called with each piece of the body and the time it came.
    """

    def __init__(self, on_body: Callable[[bytes, float], None]) -> None:
        self.sent_time: float | None = None
        self.head_time: float | None = None
        self.last_time: float | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.on_body = on_body
        self.done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.connection: _Connection | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Ends it from either side; a second end changes nothing."""
        if not self.done.done():
            self.done.set_result(error)

    def abandon(self) -> None:
        """Drops the connection: its reply is not waited for any longer."""
        if self.connection is not None:
            self.connection.drop()


class HttpClient:
    """Connections to one server; as many as there are requests, reused where the server lets them."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, connect_timeout_s: float = 30.0) -> None:
        """Raises BenchError if the URL is none of HTTP."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"the URL is {url!r}; it must look like http://127.0.0.1:8000")
        try:
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise BenchError(f"the URL is {url!r}: {error}") from None
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._headers = [("host", parts.netloc.rpartition("@")[2]), *(headers or {}).items()]
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def start(self, method: str, path: str, body: bytes | None, exchange: Exchange) -> None:
        """Sends a request; its reply comes to `exchange`. Raises ConnectError."""
        connection = self._reusable()
        if connection is None:
            connection = await self._connect()
        headers = list(self._headers)
        if body is not None:
            headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
        connection.send(h11.Request(method=method, target=self._path + path, headers=headers), body, exchange)

    async def fetch(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float = 30.0
    ) -> tuple[int, bytes]:
        """Status and body of one whole reply. Raises ConnectError, ClosedError, ProtocolError or TimeoutError."""
        received = bytearray()

        def keep(data: bytes, time: float) -> None:
            received.extend(data)
            if len(received) > MAX_REPLY_BYTES:
                exchange.finish(ProtocolError(f"the reply to {path} is longer than {MAX_REPLY_BYTES} bytes"))

        exchange = Exchange(keep)
        try:
            async with asyncio.timeout(timeout_s):
                await self.start(method, path, body, exchange)
                error = await exchange.done
        except BaseException:
            exchange.abandon()
            raise
        if error is not None:
            raise error
        assert exchange.status is not None
        return exchange.status, bytes(received)

    async def close(self) -> None:
        for connection in list(self._all):
            connection.drop()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports close

    def _reusable(self) -> "_Connection | None":
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()  # the newest: the others may grow old
            if connection.is_open and now - connection.idle_since < REUSE_WITHIN_S:
                return connection
            connection.drop()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._idle, self._all), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise ConnectError(f"no connection to {self._host}:{self._port} in {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectError(f"cannot connect to {self._host}:{self._port}: {error}") from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection; owns h11's state and the exchange that runs on it."""

    def __init__(self, idle: "list[_Connection]", everyone: "set[_Connection]") -> None:
        self._idle = idle
        self._everyone = everyone
        self._h11 = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._loop = asyncio.get_running_loop()
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._everyone.add(self)

    def send(self, head: h11.Request, body: bytes | None, exchange: Exchange) -> None:
        assert self._transport is not None
        self._exchange = exchange
        exchange.connection = self
        parts = [self._h11.send(head)]
        if body is not None:
            parts.append(self._h11.send(h11.Data(data=body)))
        parts.append(self._h11.send(h11.EndOfMessage()))
        exchange.sent_time = exchange.last_time = self._loop.time()
        self._transport.write(b"".join(part for part in parts if part))

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        exchange = self._exchange
        if exchange is None:  # nothing was asked: whatever it is, the next reply would be out of step
            self.drop()
            return
        exchange.last_time = now
        self._h11.receive_data(data)
        self._read(exchange, now)

    def eof_received(self) -> None:
        """Returns None, which closes the transport: a half-open connection is of no use here."""
        if self._exchange is not None:
            self._h11.receive_data(b"")
            self._read(self._exchange, self._loop.time())

    def connection_lost(self, error: Exception | None) -> None:
        self._everyone.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._exchange is not None:
            self._exchange.finish(ClosedError(str(error) if error else "the server closed the connection"))

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _read(self, exchange: Exchange, now: float) -> None:
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                if self._h11.trailing_data[1] and exchange.status is not None:
                    exchange.finish(ClosedError("the server closed the connection in the middle of its reply"))
                elif self._h11.trailing_data[1]:
                    exchange.finish(ClosedError("the server closed the connection without a reply"))
                else:
                    exchange.finish(ProtocolError(f"this is no HTTP: {error}"))
                self.drop()
                return
            if event is h11.NEED_DATA:
                return
            if isinstance(event, h11.Data):
                exchange.on_body(bytes(event.data), now)
            elif isinstance(event, h11.Response):
                exchange.status = event.status_code
                exchange.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                exchange.head_time = now
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                self._exchange = None
                exchange.finish()
                self._make_idle(now)
                return

    def _make_idle(self, now: float) -> None:
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE and self.is_open:
            self._h11.start_next_cycle()
            self.idle_since = now
            self._idle.append(self)
        else:
            self.drop()
