"""Runs the HTTP server until a signal or the engine's death ends it; owns the socket."""

import asyncio
import os
import socket
import ssl
from functools import partial

import uvicorn
from rich.console import Console
from starlette.applications import Starlette

from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.startup.loading import load_engine
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.checkpoint import open_checkpoint, resolve_model
from server.app import create_app
from server.cli.progress import LoadDisplay
from server.config import ServeConfig, ServerSection
from server.engine.async_engine import AsyncEngine
from server.engine.async_engine import Progress as OnProgress
from server.engine.engine_client import EngineClient, UnavailableError
from server.grpc.channel import open_channel
from server.grpc.remote_engine import RemoteEngine
from server.lifecycle import DrainingServer, raise_failure
from server.observability.logs import configure_logging
from server.security.connection import bounded_protocol

BACKLOG = 2048


def serve(config: ServeConfig) -> None:
    """Listens at once, loads the model meanwhile, and returns after a signal.

    Raises:
      ConfigError: the address cannot be had.
      JaxserveError, ModelError: the model cannot be loaded, or the engine ended in traffic.
    """
    configure_logging(config.server.observability)
    tokenizer = load_tokenizer(resolve_model(config.model.path))
    listener = listen(config.server)
    engine: EngineClient
    if config.server.engine is not None:
        engine = connect(config)
    else:
        engine = AsyncEngine(
            partial(load, config, tokenizer, LoadDisplay(Console(stderr=True))),
            step_timeout_s=config.server.step_timeout_s,
            request_timeout_s=config.server.limits.request_timeout_s,
        )
    run_server(create_app(engine, tokenizer, config.server), engine, listener, config.server)


def connect(config: ServeConfig) -> RemoteEngine:
    """The engine in another process; only its checkpoint's description is read here. Raises ConfigError, ModelError."""
    settings = config.server
    assert settings.engine is not None
    return RemoteEngine(
        partial(open_channel, settings.engine, settings.engine_ca, settings.security),
        open_checkpoint(resolve_model(config.model.path)).config,
        key=os.environ.get(settings.engine_key_variable),
    )


def run_server(app: Starlette, engine: EngineClient, listener: socket.socket, settings: ServerSection) -> None:
    """Serves on a socket that listens already; raises what ended the engine, if anything did."""
    config = uvicorn_config(app, settings)
    asyncio.run(_run(config, engine, listener, settings))
    raise_failure(engine)


def uvicorn_config(app: Starlette, settings: ServerSection) -> uvicorn.Config:
    """uvicorn under our limits. Raises ConfigError where the TLS files cannot be used."""
    limits, security = settings.limits, settings.security
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_level="error",  # what it warns of is what clients send
        access_log=False,
        http=bounded_protocol(limits),
        ws="none",
        h11_max_incomplete_event_size=limits.max_header_bytes,
        timeout_keep_alive=limits.keep_alive_s,
        server_header=False,
        ssl_certfile=security.tls_certificate,
        ssl_keyfile=security.tls_key,
        ssl_ca_certs=security.tls_client_ca,
        ssl_cert_reqs=ssl.CERT_NONE if security.tls_client_ca is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the TLS files cannot be used: {error} (server.security.tls_*)") from None
    return config


def listen(address: ServerSection) -> socket.socket:
    """A listening socket; raises ConfigError where the address cannot be had."""
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror} (server.host, server.port)"
        ) from None


def load(config: ServeConfig, tokenizer: Tokenizer, display: LoadDisplay, on_progress: OnProgress) -> Engine:
    """For AsyncEngine: loads, and shows how it goes."""

    def progress(phase: str, done: int, total: int) -> None:
        display.update(phase, done, total)
        on_progress(phase, done, total)

    try:
        return load_engine(config, tokenizer, progress=progress)
    finally:
        display.close()


async def _run(config: uvicorn.Config, engine: EngineClient, listener: socket.socket, settings: ServerSection) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl is None else "https"
    address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    console = Console(stderr=True)
    console.print(f"listening on {address}", highlight=False)
    server = DrainingServer(config, engine, settings.shutdown_timeout_s)
    tasks = [asyncio.create_task(_announce(engine, address, console)), asyncio.create_task(_end_with(engine, server))]
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _end_with(engine: EngineClient, server: DrainingServer) -> None:
    await engine.wait_until_dead()
    server.begin_shutdown()  # nothing is left to drain, but the last replies are still on their way


async def _announce(engine: EngineClient, address: str, console: Console) -> None:
    """Tells when requests are taken."""
    try:
        loaded = await engine.wait_until_ready()
    except (EngineDeadError, UnavailableError):  # told at the end; or a signal came first
        return
    config = loaded.config
    console.print(
        f"ready: {loaded.model_name} in {config.model.dtype} at {address}/v1; {loaded.max_model_len} tokens a request, "
        f"{config.scheduler.max_num_seqs} requests at once, {config.cache.num_pages} pages of {config.cache.page_size}",
        highlight=False,
        soft_wrap=True,
    )
