"""Runs the HTTP server until a signal ends it; owns the socket, the order of shutdown and the progress display."""

import asyncio
import socket
from functools import partial

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.loading import load_engine
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.checkpoint import resolve_model
from server.app import create_app
from server.async_engine import AsyncEngine, UnavailableError
from server.async_engine import Progress as OnProgress
from server.config import ServeConfig, ServerSection

BACKLOG = 2048
GRACE_S = 15  # for uvicorn on top of the drain


class LoadDisplay:
    """Shows how loading goes: a bar on a terminal, else a line a phase and a line each tenth of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_tenth: tuple[str, int] | None = None

    def update(self, phase: str, done: int, total: int) -> None:
        """Called from the engine's thread."""
        if not self._console.is_terminal:
            tenth = (phase, 10 * done // max(total, 1))
            if tenth != self._last_tenth:
                self._last_tenth = tenth
                self._console.print(f"{phase}: {done}/{total}", highlight=False)
            return
        if not self._tasks:
            self._bar.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total)
        self._bar.update(self._tasks[phase], completed=done, total=total)

    def close(self) -> None:
        self._bar.stop()


class DrainingServer(uvicorn.Server):
    """On a signal, lets running requests end for a while before it closes what is left."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn waits until the connections are done; draining makes sure that they will be.
        draining = asyncio.create_task(self._engine.drain(self._drain_timeout_s))
        await super().shutdown(sockets)
        await draining


def serve(config: ServeConfig) -> None:
    """Listens at once, loads the model meanwhile, and returns after a signal.

    Raises:
      ConfigError: the address cannot be had.
      JaxserveError, ModelError: the model cannot be loaded.
    """
    tokenizer = load_tokenizer(resolve_model(config.model.path))
    listener = listen(config.server)
    console = Console(stderr=True)
    display = LoadDisplay(console)
    engine = AsyncEngine(partial(_load, config, tokenizer, display))
    app = create_app(engine, tokenizer, config.server)
    # The drain ends every request by itself; uvicorn's own timeout only catches clients that do not read.
    uvicorn_config = uvicorn.Config(
        app,
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(config.server.drain_timeout_s) + GRACE_S,
    )
    server = DrainingServer(uvicorn_config, engine, config.server.drain_timeout_s)
    asyncio.run(_run(server, engine, listener, console, display))
    if engine.failure is not None:
        raise engine.failure


def listen(address: ServerSection) -> socket.socket:
    """A listening socket; raises ConfigError where the address cannot be had."""
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror} (server.host, server.port)"
        ) from None


def _load(config: ServeConfig, tokenizer: Tokenizer, display: LoadDisplay, on_progress: OnProgress) -> Engine:
    def progress(phase: str, done: int, total: int) -> None:
        display.update(phase, done, total)
        on_progress(phase, done, total)

    return load_engine(config, tokenizer, progress=progress)


async def _run(
    server: uvicorn.Server, engine: AsyncEngine, listener: socket.socket, console: Console, display: LoadDisplay
) -> None:
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    console.print(f"listening on {address}", highlight=False)
    announcement = asyncio.create_task(_announce(server, engine, address, console, display))
    await server.serve(sockets=[listener])
    await announcement


async def _announce(
    server: uvicorn.Server, engine: AsyncEngine, address: str, console: Console, display: LoadDisplay
) -> None:
    """Tells when requests are taken; ends the server if they never will be."""
    try:
        loaded = await engine.wait_until_ready()
    except EngineDeadError:
        server.should_exit = True
        return
    except UnavailableError:  # a signal came first
        return
    finally:
        display.close()
    config = loaded.config
    console.print(
        f"ready: {loaded.model_name} in {config.model.dtype} at {address}/v1; {loaded.max_model_len} tokens a request, "
        f"{config.scheduler.max_num_seqs} requests at once, {config.cache.num_pages} pages of {config.cache.page_size}",
        highlight=False,
        soft_wrap=True,
    )
