"""Speaks to the server under test: HTTP, server-sent events read strictly, raw sockets for what no client sends."""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from server.conformance.case import FailedError, SkippedError, expect

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# What an error must never tell: where the program lies, and the traces of its language.
LEAKS = re.compile(r"Traceback|site-packages|\.py\b|/home/|/usr/|/root/|/opt/")
MAX_SHOWN = 200


class Server:
    """One server under test.

    Attributes:
      model: the id that requests name.
    """

    def __init__(self, url: str, *, model: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.api_key = api_key
        self.timeout_s = timeout_s
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout_s)

    def completion_body(self, **fields: Any) -> Json:
        return {"model": self.model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **fields}

    def chat_body(self, **fields: Any) -> Json:
        messages = [{"role": "user", "content": "Say hello."}]
        return {"model": self.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}

    def body(self, path: str, **fields: Any) -> Json:
        return self.completion_body(**fields) if path == COMPLETIONS else self.chat_body(**fields)

    async def completion(self, **fields: Any) -> Json:
        return await self.accepted(COMPLETIONS, self.completion_body(**fields))

    async def chat(self, **fields: Any) -> Json:
        return await self.accepted(CHAT, self.chat_body(**fields))

    async def completion_text(self, **fields: Any) -> str:
        text: str = (await self.completion(**fields))["choices"][0]["text"]
        return text

    async def chat_text(self, **fields: Any) -> str:
        text: str = (await self.chat(**fields))["choices"][0]["message"]["content"]
        return text

    async def accepted(self, path: str, body: Any) -> Json:
        """The answer to a request that must be served."""
        reply = await self.http.post(path, json=body)
        expect(reply.status_code == 200, f"{path} answered {reply.status_code}: {shorten(reply.text)}")
        answer: Json = reply.json()
        return answer

    async def refused(self, path: str, body: Any, *statuses: int, names: str | None = None) -> Json:
        """The error of a request that must not be served.

        Args:
          body: sent as JSON, or as it is where it is bytes.
          statuses: allowed; 400 and 422 unless said otherwise.
          names: a parameter that the error must name, in `param` or in its message.
        """
        if isinstance(body, bytes):
            reply = await self.http.post(path, content=body, headers={"content-type": "application/json"})
        else:
            reply = await self.http.post(path, json=body)
        return check_error(reply, *(statuses or (400, 422)), names=names)

    async def stream(self, path: str, body: Json) -> list[Json]:
        """The chunks of a stream that must be served, read strictly; `[DONE]` is checked and left out."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as reply:
            raw = b"".join([piece async for piece in reply.aiter_raw()])
            expect(reply.status_code == 200, f"{path} answered {reply.status_code}: {shorten(raw.decode())}")
            kind = reply.headers.get("content-type", "")
            expect(kind.startswith("text/event-stream"), f"the stream's content-type is {kind!r}")
        return read_events(raw)

    async def raw(self, request: bytes, *, wait_s: float = 10.0) -> bytes:
        """Sends bytes as they are; returns what comes back until the server closes or `wait_s` have passed."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), ssl=parts.scheme == "https" or None
        )
        received = bytearray()
        try:
            writer.write(request)
            await writer.drain()
            async with asyncio.timeout(wait_s):
                while piece := await reader.read(65536):
                    received += piece
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
        return bytes(received)

    def raw_post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> bytes:
        """A whole request as bytes, which closes its connection."""
        fields = {"host": urlsplit(self.url).netloc, "content-type": "application/json", "connection": "close"}
        if self.api_key is not None:
            fields["authorization"] = f"Bearer {self.api_key}"
        fields |= {"content-length": str(len(body)), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body

    async def metrics(self) -> dict[str, float]:
        """Samples of `/metrics` by name, prefix and labels taken off and summed; skipped where there is none."""
        reply = await self.http.get("/metrics")
        if reply.status_code != 200:
            raise SkippedError("no /metrics here")
        samples: dict[str, float] = {}
        for line in reply.text.splitlines():
            match = re.fullmatch(r"(?:\w+:)?(\w+)(?:\{.*\})? (\S+)", line)
            if match:
                samples[match[1]] = samples.get(match[1], 0.0) + float(match[2])
        return samples

    async def wait_until_idle(self, within_s: float = 15.0) -> None:
        """Returns when the server's own gauge says that nothing runs; fails if it does not get there."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            samples = await self.metrics()
            if "num_requests_running" not in samples:
                raise SkippedError("no num_requests_running in /metrics")
            running = samples["num_requests_running"] + samples.get("num_requests_waiting", 0)
            if running == 0:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise FailedError(f"{running:.0f} requests still run {within_s:.0f} s after their clients left")
            await asyncio.sleep(0.1)

    async def token_ids(self, text: str) -> list[int]:
        """By the server's own tokenizer; skipped where it does not tell."""
        reply = await self.http.post("/tokenize", json={"model": self.model, "prompt": text})
        if reply.status_code != 200 or "tokens" not in reply.json():
            raise SkippedError("no /tokenize here")
        ids: list[int] = reply.json()["tokens"]
        return ids


def read_events(raw: bytes) -> list[Json]:
    """Every event's JSON. Fails on what is no event, on a missing `[DONE]`, and on anything after it."""
    chunks: list[Json] = []
    done = False
    for event in raw.decode().replace("\r\n", "\n").split("\n\n"):
        data = [line[5:].removeprefix(" ") for line in event.split("\n") if line.startswith("data:")]
        if not data:
            odd = [line for line in event.split("\n") if line and not line.startswith((":", "event:", "id:", "retry:"))]
            expect(not odd, f"a line of the stream is no field: {odd}")
            continue
        expect(not done, f"an event after [DONE]: {shorten(event)}")
        if data == ["[DONE]"]:
            done = True
            continue
        try:
            chunks.append(json.loads("\n".join(data), parse_constant=_refuse_constant))
        except (ValueError, RecursionError) as error:
            raise FailedError(f"an event is no JSON ({error}): {shorten(event)}") from None
    expect(done, "the stream ends without [DONE]")
    return chunks


def check_error(reply: httpx.Response, *statuses: int, names: str | None = None) -> Json:
    """The error object of a reply that must be one of these."""
    expect(
        reply.status_code in statuses,
        f"answered {reply.status_code}, not {' or '.join(map(str, statuses))}: {shorten(reply.text)}",
    )
    try:
        error = reply.json()["error"]
        message = error["message"]
    except (ValueError, KeyError, TypeError):
        raise FailedError(f"the error has not OpenAI's shape: {shorten(reply.text)}") from None
    expect(isinstance(message, str) and bool(message), f"the error has no message: {shorten(reply.text)}")
    leak = LEAKS.search(reply.text)
    expect(leak is None, f"the error tells its insides: {shorten(reply.text)}")
    if names is not None:
        told = error.get("param") == names or names in message
        expect(told, f"the error does not name {names}: {shorten(reply.text)}")
    found: Json = error
    return found


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
