"""Runs the HTTP server until a signal ends it; owns the socket and the order of shutdown."""

import asyncio
import socket
from functools import partial

import uvicorn
from rich.console import Console

from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.loading import load_engine
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.checkpoint import resolve_model
from server.app import create_app
from server.async_engine import AsyncEngine, UnavailableError
from server.async_engine import Progress as OnProgress
from server.config import ServeConfig, ServerSection
from server.progress import LoadDisplay

BACKLOG = 2048
GRACE_S = 15  # for uvicorn on top of the drain


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
