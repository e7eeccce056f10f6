"""Serves the embedded model, sends eight chats at once over HTTP, shows their streams and what they cost."""

import argparse
import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

CHATS = (
    ("What is the capital of France?", 40),
    ("Count from one to twenty.", 90),
    ("Write a short poem about the sea.", 120),
    ("Why is the sky blue?", 160),
    ("Name three fruits.", 60),
    ("Explain what a hash table is to a ten-year-old.", 200),
    ("Translate 'good morning' into Spanish.", 40),
    ("Tell me a story about a robot who learns to paint.", 256),
)
READY_TIMEOUT_S = 600
KEPT_PORT = 8000


@dataclass
class Reply:
    """One chat's stream as it comes."""

    question: str
    max_tokens: int
    text: str = ""
    tokens: int = 0
    sent_at: float = 0.0
    first_at: float | None = None
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.sent_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help=f"leave the server running, on port {KEPT_PORT}")
    parser.add_argument("--config", default="configs/cpu-demo.yaml")
    parser.add_argument("--port", type=int, default=0, help="by default a free one")
    options = parser.parse_args()
    console = Console()
    port = options.port or (KEPT_PORT if options.keep else free_port())
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("jaxserve")), "serve"]
    command += ["--config", options.config, "--host", "127.0.0.1", "--port", str(port)]
    console.print(f"$ {' '.join(['jaxserve', *command[1:]])}", highlight=False)
    started_at = time.perf_counter()
    # A session of its own: Ctrl-C ends the demo and not, with --keep, the server.
    server = subprocess.Popen(command, start_new_session=True)
    is_kept = False
    try:
        wait_until_ready(server, url)
        console.print(f"ready after {time.perf_counter() - started_at:.1f} s\n", highlight=False)
        asyncio.run(converse(url, console))
        is_kept = options.keep
    finally:
        if not is_kept:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    if is_kept:
        console.print(f"\nthe server stays at {url}/v1 (process {server.pid}); try:", highlight=False)
        console.print(
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '"
            '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}]}\'',
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    """The server shows its own progress; /health says 200 when it is done."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {READY_TIMEOUT_S} s (exit code {server.poll()})")


async def converse(url: str, console: Console) -> None:
    replies = [Reply(question, max_tokens) for question, max_tokens in CHATS]
    timeout = httpx.Timeout(READY_TIMEOUT_S)
    async with httpx.AsyncClient(base_url=url, timeout=timeout) as client:
        pages_used = [0]
        watcher = asyncio.create_task(watch_pages(client, pages_used))
        started_at = time.perf_counter()
        if console.is_terminal:
            with Live(console=console, refresh_per_second=8) as live:

                def redraw(_: Reply) -> None:
                    live.update(table(replies))

                await asyncio.gather(*(stream(client, reply, redraw) for reply in replies))
                live.update(table(replies))
        else:

            def print_when_done(reply: Reply) -> None:
                if reply.finish_reason is not None:
                    answer = " ".join(reply.text.split())
                    console.print(f"[{reply.tokens:3d} tokens] {reply.question}", highlight=False, markup=False)
                    console.print(f"    {answer}", highlight=False, markup=False, soft_wrap=True)

            await asyncio.gather(*(stream(client, reply, print_when_done) for reply in replies))
        elapsed_s = time.perf_counter() - started_at
        watcher.cancel()
        metrics = await read_metrics(client)
    ttfts = sorted(reply.ttft_s for reply in replies if reply.ttft_s is not None)
    tokens = sum(reply.tokens for reply in replies)
    assert len(ttfts) == len(replies), "a reply had no token"
    console.print(
        f"\n{len(replies)} chats at once, {tokens} tokens in {elapsed_s:.1f} s: {tokens / elapsed_s:.0f} tokens/s\n"
        f"time to first token: median {ttfts[len(ttfts) // 2]:.2f} s, worst {ttfts[-1]:.2f} s\n"
        f"pages used at most: {pages_used[0]} of {metrics['jaxserve:pages_total']:.0f}\n"
        f"compilations after ready: {metrics['jaxserve:compilations_after_ready_total']:.0f}",
        highlight=False,
    )


async def stream(client: httpx.AsyncClient, reply: Reply, show: Callable[[Reply], None]) -> None:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": reply.question}],
        "max_tokens": reply.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    finish_reason = None
    reply.sent_at = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                reply.tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    reply.first_at = reply.first_at or time.perf_counter()
                    reply.text += choice["delta"]["content"]
                    reply.tokens += 1
                finish_reason = choice["finish_reason"] or finish_reason
                show(reply)
    if finish_reason is None:
        raise SystemExit(f"the stream of {reply.question!r} ended without a finish reason")
    reply.finish_reason = finish_reason
    show(reply)


def table(replies: list[Reply]) -> Table:
    view = Table(expand=True, box=None, padding=(0, 1))
    view.add_column("first token", justify="right", width=11)
    view.add_column("tokens", justify="right", width=6)
    view.add_column("question", ratio=2, no_wrap=True)
    view.add_column("answer", ratio=5, no_wrap=True)
    for reply in replies:
        ttft = "" if reply.ttft_s is None else f"{reply.ttft_s:.2f} s"
        answer = Text(" ".join(reply.text.split())[-160:], style="green" if reply.finish_reason else "")
        view.add_row(ttft, str(reply.tokens), reply.question, answer)
    return view


async def watch_pages(client: httpx.AsyncClient, most: list[int]) -> None:
    while True:
        metrics = await read_metrics(client)
        most[0] = max(most[0], int(metrics["jaxserve:pages_active"]))
        await asyncio.sleep(0.25)


async def read_metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """The values of /metrics that have no label but the model's."""
    lines = (await client.get("/metrics")).text.splitlines()
    samples = [re.fullmatch(r'([\w:]+)(?:\{model_name="[^"]*"\})? (\S+)', line) for line in lines]
    return {sample[1]: float(sample[2]) for sample in samples if sample is not None}


if __name__ == "__main__":
    main()
