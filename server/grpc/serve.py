"""Runs the engine's process, `jaxserve engine`: gRPC alone, until a signal or the engine's death ends it."""

import asyncio
import logging
from contextlib import suppress
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rich.console import Console

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.checkpoint import resolve_model
from server.cli.progress import LoadDisplay
from server.config import SecuritySection, ServeConfig, ServerSection
from server.engine.async_engine import AsyncEngine
from server.grpc import engine_pb2
from server.grpc.channel import read_pem
from server.grpc.engine_pb2_grpc import add_EngineServicer_to_server
from server.grpc.keys import KeyInterceptor
from server.grpc.parsing import ParsingInterceptor
from server.grpc.servicer import EngineService
from server.lifecycle import GRACE_S, SIGNALS, raise_failure
from server.observability.logs import configure_logging
from server.security.keys import read_api_keys
from server.serve import load

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
HEALTH_INTERVAL_S = 0.2
# What an HTTP front end took must fit a message: a byte of JSON is one token at most, and an id has three bytes.
MESSAGE_BYTES_PER_BODY_BYTE = 4


def serve_engine(config: ServeConfig) -> None:
    """Listens at `server.grpc_listen`, loads the model meanwhile, and returns after a signal.

    Raises:
      ConfigError: the address cannot be had, or keys or TLS files cannot be used.
      JaxserveError, ModelError: the model cannot be loaded, or the engine ended in traffic.
    """
    configure_logging(config.server.observability)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    tokenizer = load_tokenizer(resolve_model(config.model.path))
    display = LoadDisplay(Console(stderr=True))
    engine = AsyncEngine(
        partial(load, config, tokenizer, display),
        step_timeout_s=config.server.step_timeout_s,
        request_timeout_s=config.server.limits.request_timeout_s,
    )
    run_engine_server(engine, tokenizer, config.server)


def _is_news(record: logging.LogRecord) -> bool:
    """A client that leaves while its answer is being sent is none; grpc logs it as an error, with a traceback."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def run_engine_server(engine: AsyncEngine, tokenizer: Tokenizer, settings: ServerSection) -> None:
    """Serves an engine that is not started yet; raises what ended it, if anything did."""
    asyncio.run(_run(engine, tokenizer, settings))
    raise_failure(engine)


async def _run(engine: AsyncEngine, tokenizer: Tokenizer, settings: ServerSection) -> None:
    console = Console(stderr=True)
    service = EngineService(engine, tokenizer, settings.text_threads, settings.limits.max_connections)
    server, checks = make_server(service, settings)
    address = await listen(server, settings)
    console.print(f"listening on {address}", highlight=False)
    shutdown = _Shutdown(engine, settings.shutdown_timeout_s)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, shutdown.begin)
    engine.start()
    tasks = [
        asyncio.create_task(_tell_health(engine, checks, console)),
        asyncio.create_task(_end_with(engine, shutdown)),
    ]
    await shutdown.drained.wait()
    await server.stop(GRACE_S)
    await engine.close()
    service.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for number in SIGNALS:
        loop.remove_signal_handler(number)


class _Shutdown:
    """The first call drains, the second aborts what is still open."""

    def __init__(self, engine: AsyncEngine, timeout_s: float) -> None:
        self.drained = asyncio.Event()
        self._engine = engine
        self._timeout_s = timeout_s
        self._draining: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._engine.abort_all()

    async def _drain(self) -> None:
        await self._engine.drain(self._timeout_s)
        self.drained.set()


def make_server(service: EngineService, settings: ServerSection) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    keys = read_api_keys(settings.security)
    server = grpc.aio.server(
        interceptors=[*([KeyInterceptor(keys)] if keys else ()), ParsingInterceptor()],
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES_PER_BODY_BYTE * settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second server at one address is a mistake, not a helper
            # A front end whose machine vanished says no goodbye: ask now and then whether it is there.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ],
    )
    add_EngineServicer_to_server(service, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, checks


async def listen(server: grpc.aio.Server, settings: ServerSection) -> str:
    """Starts the server; returns its address."""
    host, _, _ = settings.grpc_listen.rpartition(":")
    credentials = _credentials(settings.security)
    try:
        if credentials is None:
            port = server.add_insecure_port(settings.grpc_listen)
        else:
            port = server.add_secure_port(settings.grpc_listen, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {settings.grpc_listen}: {error} (server.grpc_listen)") from None
    await server.start()
    return f"{host}:{port}"


def _credentials(security: SecuritySection) -> grpc.ServerCredentials | None:
    if security.tls_certificate is None or security.tls_key is None:
        return None
    authority = None if security.tls_client_ca is None else read_pem(security.tls_client_ca)
    return grpc.ssl_server_credentials(
        [(read_pem(security.tls_key), read_pem(security.tls_certificate))],
        root_certificates=authority,
        require_client_auth=authority is not None,
    )


async def _end_with(engine: AsyncEngine, shutdown: _Shutdown) -> None:
    await engine.wait_until_dead()
    shutdown.begin()


async def _tell_health(engine: AsyncEngine, checks: health.aio.HealthServicer, console: Console) -> None:
    """Keeps grpc.health.v1 in step with the engine's state, and tells when requests are taken."""
    told = None
    with suppress(asyncio.CancelledError):
        while True:
            if engine.state != told:
                told = engine.state
                serving = health_pb2.HealthCheckResponse
                status = serving.SERVING if told == "ready" else serving.NOT_SERVING
                for name in ("", SERVICE):
                    await checks.set(name, status)
                if told == "ready":
                    console.print(f"ready: {engine.model_name}", highlight=False)
            await asyncio.sleep(HEALTH_INTERVAL_S)
