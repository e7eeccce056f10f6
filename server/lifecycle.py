"""From the first signal to the last byte: drains, aborts, and ends the process when the engine has ended."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from jaxserve.errors import EngineDeadError, JaxserveError
from models.errors import ModelError
from server.engine.engine_client import EngineClient

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_STUCK = 2  # as for every other error that was told in one line
GRACE_S = 10  # after the drain, for what was written but not yet read by its client


class DrainingServer(uvicorn.Server):
    """Goes on listening while it drains, so that probes and late requests get their 503, and only then closes.

    The first signal drains: running requests have `shutdown_timeout_s` to end. The second aborts them. A third no
    longer waits for clients that do not read.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineClient, shutdown_timeout_s: float) -> None:
        config.timeout_graceful_shutdown = GRACE_S
        super().__init__(config)
        self._engine = engine
        self._shutdown_timeout_s = shutdown_timeout_s
        self._draining: asyncio.Task[None] | None = None

    def begin_shutdown(self) -> None:
        """What a signal does; belongs to the event loop."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        elif not self.should_exit:
            self._engine.abort_all()
        else:
            self.force_exit = True

    async def _drain(self) -> None:
        await self._engine.drain(self._shutdown_timeout_s)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which stops listening at the first signal and in the end dies of it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.begin_shutdown)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


def raise_failure(engine: EngineClient) -> None:
    """Raises what ended the engine, if anything did, once the server has closed.

    A thread that hangs in the device cannot be ended, and an orderly exit would wait for it: the process ends at once.
    """
    failure = engine.failure
    if engine.is_stuck:
        print(f"jaxserve: {failure or 'the device hangs'}", file=sys.stderr, flush=True)
        os._exit(EXIT_STUCK)
    if isinstance(failure, JaxserveError | ModelError):
        raise failure
    if failure is not None:
        raise EngineDeadError(f"the engine ended with {type(failure).__name__}: {failure}") from failure
