"""A real HTTP server on a thread, for tests that speak to it with a real client."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
import openai
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from server.config import ServerSection
from server.engine.async_engine import AsyncEngine
from server.lifecycle import DrainingServer
from server.serve import listen, uvicorn_config

TIMEOUT_S = 60.0
READY_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveServer:
    """`stop` does what a signal does, and returns at once."""

    url: str
    engine: AsyncEngine
    stop: Callable[[], None]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=TIMEOUT_S)

    def post(self, path: str, body: object) -> httpx.Response:
        if isinstance(body, bytes):
            return httpx.post(
                self.url + path, content=body, headers={"content-type": "application/json"}, timeout=TIMEOUT_S
            )
        return httpx.post(self.url + path, json=body, timeout=TIMEOUT_S)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (health := self.get("/health")).status_code != 200:
            assert health.json()["status"] == "loading", health.text
            assert time.monotonic() < deadline, health.text
            time.sleep(0.05)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample, e.g. `request_success_total`; 0 where it was never counted."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"jaxserve:{name}" and labels.items() <= sample.labels.items()
        )


@contextmanager
def serving(
    make_app: Callable[[AsyncEngine], Starlette],
    make_engine: Callable[[], AsyncEngine],
    shutdown_timeout_s: float = 5.0,
    settings: ServerSection | None = None,
) -> Iterator[LiveServer]:
    """Serves until the block is left; the engine may still be loading when it is entered."""
    listener = listen(ServerSection(port=0))
    started, stopped = threading.Event(), threading.Event()
    live: dict[str, LiveServer] = {}

    async def run() -> None:
        engine = make_engine()
        config = uvicorn_config(make_app(engine), settings or ServerSection())
        server = DrainingServer(config, engine, shutdown_timeout_s)

        loop = asyncio.get_running_loop()

        def stop() -> None:
            stopped.set()
            with suppress(RuntimeError):  # it has stopped, its loop is closed
                loop.call_soon_threadsafe(server.begin_shutdown)

        live["server"] = LiveServer(url=f"http://127.0.0.1:{listener.getsockname()[1]}", engine=engine, stop=stop)
        started.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="server")
    thread.start()
    try:
        assert started.wait(TIMEOUT_S)
        yield live["server"]
    finally:
        if not stopped.is_set():  # a second call would abort
            live["server"].stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def serving_app(app: Starlette) -> Iterator[str]:
    """Serves an application without an engine; yields its URL."""
    listener = listen(ServerSection(port=0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), name="app")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
