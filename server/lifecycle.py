"""From the first signal to the last byte: drains, aborts, and ends the process when the engine has ended."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from server.async_engine import AsyncEngine

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 10  # after the drain, for what was written but not yet read by its client


class DrainingServer(uvicorn.Server):
    """Goes on listening while it drains, so that probes and late requests get their 503, and only then closes.

    The first signal drains: running requests have `shutdown_timeout_s` to end. The second aborts them. A third no
    longer waits for clients that do not read.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, shutdown_timeout_s: float) -> None:
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
