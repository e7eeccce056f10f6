"""A server that plays whatever script a request brings along, byte by byte, for a load generator to be measured by.

Run as a program it serves in a process of its own: `python scripted_server.py PORT [STALL_AT_S STALL_S]`. It then
freezes once, as a whole, so many seconds after its first request.
"""

import asyncio
import json
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

Step = tuple[float, str | None]  # milliseconds after the request came, and bytes as latin-1; None closes, "RST" resets
HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = "0\r\n\r\n"
DEFAULT_TOKENS = 4
DEFAULT_INTERVAL_MS = 20.0


class ScriptedServer:
    """`metrics` is what /metrics answers; `on_first` is called when the first request to a model is there."""

    def __init__(self) -> None:
        self.metrics = ""
        self.model_list: Any = {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
        self.bodies: list[dict[str, Any]] = []
        self.keeps_bodies = True
        self.refused_fields: tuple[str, ...] = ()
        self.counts_streams = True
        self.num_connections = 0
        self.on_first: Callable[[], None] | None = None

    async def listen(self, port: int = 0, tls: ssl.SSLContext | None = None) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), "127.0.0.1", port, backlog=4096, ssl=tls
        )

    def script_for(self, path: str, body: dict[str, Any]) -> Sequence[Step]:
        if path == "/v1/models":
            return [(0, plain(200, json.dumps(self.model_list)))]
        if path == "/metrics":
            return [(0, plain(200, self.metrics, "text/plain") if self.metrics else plain(404, "none"))]
        refused = [name for name in self.refused_fields if name in body or name in body.get("stream_options", {})]
        if refused:
            return [(0, plain(400, json.dumps({"error": {"message": f"unknown parameter {refused[0]}"}})))]
        if not body.get("stream"):
            counts = usage(len(prompt_of(body).split()) + 10, 1)
            return [(0, plain(200, json.dumps({**counts, "choices": [{"index": 0, "text": "tok"}]})))]
        script: Sequence[Step] = (
            body["script"] if "script" in body else default_script(body, has_usage=self.counts_streams)
        )
        return script


class _Connection(asyncio.Protocol):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._received = b""
        self._loop = asyncio.get_running_loop()
        server.num_connections += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.decode("latin-1").lower().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
        if len(rest) < length:
            return
        self._received = rest[length:]
        self._play(head.split(b" ")[1].decode(), json.loads(rest[:length]) if length else {})

    def _play(self, path: str, body: dict[str, Any]) -> None:
        now = self._loop.time()
        if path.startswith("/v1/c"):
            if self._server.keeps_bodies:
                self._server.bodies.append(body)
            if self._server.on_first is not None:
                self._server.on_first()
                self._server.on_first = None
        self._go_on(self._server.script_for(path, body), 0, now)

    def _go_on(self, script: Sequence[Step], index: int, start: float) -> None:
        """Does all steps that are due, one after the other: timers of one instant would come in any order."""
        while index < len(script):
            at_ms, data = script[index]
            if start + at_ms / 1e3 > self._loop.time() + 1e-6:
                self._loop.call_at(start + at_ms / 1e3, self._go_on, script, index, start)
                return
            if data is None:
                self._transport.close()
            elif data == "RST":
                linger = struct.pack("ii", 1, 0)
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self._transport.abort()
            else:
                self._transport.write(data.encode("latin-1"))
            index += 1


# --- what scripts are made of ---


def plain(status: int, body: str, kind: str = "application/json", headers: str = "") -> str:
    return (
        f"HTTP/1.1 {status} Said\r\ncontent-type: {kind}\r\ncontent-length: {len(body.encode('latin-1'))}\r\n"
        f"{headers}\r\n{body}"
    )


def http_chunk(data: str) -> str:
    return f"{len(data.encode('latin-1')):x}\r\n{data}\r\n"


def event(chunk: Any) -> str:
    return f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n"


def delta(text: str | None = None, *, finish: str | None = None, **choice: Any) -> dict[str, Any]:
    fields = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish, **choice}]}


def usage(prompt: Any, completion: Any, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}


def stream(timeline: Iterable[tuple[float, Any]], end_ms: float, *, ends: bool = True) -> list[Step]:
    """A whole reply: events at their milliseconds, `[DONE]` and the end of the body at `end_ms`."""
    steps: list[Step] = [(0, HEAD)]
    steps += [(at_ms, http_chunk(event(chunk))) for at_ms, chunk in timeline]
    if ends:
        steps.append((end_ms, http_chunk(event("[DONE]")) + LAST))
    return steps


def prompt_of(body: dict[str, Any]) -> str:
    text: str = body.get("prompt") or "\n".join(message["content"] for message in body["messages"])
    return text


def default_script(body: dict[str, Any], *, has_usage: bool = True) -> list[Step]:
    """`max_tokens` tokens, 20 ms apart; prompts are as many tokens as they have words, and 10 of a template."""
    num_tokens = min(body.get("max_tokens", DEFAULT_TOKENS), body.get("tokens", 1 << 30))
    end_ms = DEFAULT_INTERVAL_MS * num_tokens
    timeline: list[tuple[float, Any]] = [
        (DEFAULT_INTERVAL_MS * (number + 1), delta(" tok")) for number in range(num_tokens)
    ]
    timeline.append((end_ms, delta(finish="length")))
    if has_usage:
        timeline.append((end_ms, usage(len(prompt_of(body).split()) + 10, num_tokens)))
    return stream(timeline, end_ms)


@asynccontextmanager
async def scripted_server() -> Any:
    """A server on this event loop, and its URL."""
    scripted = ScriptedServer()
    listening = await scripted.listen()
    scripted.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield scripted
    finally:
        listening.close()
        if sys.version_info >= (3, 13):
            listening.close_clients()


async def _serve(port: int, stall_at_s: float, stall_s: float) -> None:
    scripted = ScriptedServer()
    scripted.keeps_bodies = False
    loop = asyncio.get_running_loop()
    if stall_s:
        # The whole process sleeps: connections are taken by the kernel, and nothing is answered.
        scripted.on_first = lambda: loop.call_later(stall_at_s, time.sleep, stall_s)
    listening = await scripted.listen(port)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    arguments = [float(argument) for argument in sys.argv[2:]] or [0.0, 0.0]
    asyncio.run(_serve(int(sys.argv[1]), *arguments))
