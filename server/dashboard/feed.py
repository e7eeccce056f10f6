"""Owns the viewers of the live page and the one task that feeds them all; without a viewer it does nothing."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from jaxserve.engine import Engine, EngineStats
from jaxserve.errors import JaxserveError
from jaxserve.scheduling.picture import Picture
from server.api.stream import event
from server.dashboard.payload import latency_payload, picture_payload, stats_payload
from server.engine.engine_client import EngineClient
from server.observability.metrics import Metrics
from server.observability.recent import WINDOW_S, RecentLatencies

logger = logging.getLogger(__name__)

PERIOD_S = 0.2  # between two pictures while something happens
QUIET_PERIOD_S = 1.0  # between two events while nothing does


class Viewer:
    """One open page. It is sent the newest event; those that it is too slow for are left out."""

    def __init__(self) -> None:
        self._newest: bytes | None = None
        self._arrived = asyncio.Event()
        self._is_over = False

    def put(self, message: bytes) -> None:
        self._newest = message
        self._arrived.set()

    def end(self) -> None:
        self._is_over = True
        self._arrived.set()

    async def events(self) -> AsyncGenerator[bytes]:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            message, self._newest = self._newest, None
            if message is not None:
                yield message
            elif self._is_over:
                return


class Feed:
    """Asks the engine for a picture a few times a second, and hands it to all viewers. Belongs to the event loop."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest: bytes | None = None

    @contextmanager
    def watched_by(self, viewer: Viewer) -> Iterator[None]:
        self._viewers.add(viewer)
        if self._newest is not None:
            viewer.put(self._newest)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._viewers.discard(viewer)

    async def _run(self) -> None:
        recent = self._metrics.recent = RecentLatencies()
        try:
            await self._feed(recent)
        except Exception:
            logger.exception("the live page's feed ended; it starts again with the next viewer")
        self._metrics.recent = self._newest = self._task = None
        for viewer in self._viewers:
            viewer.end()
        with suppress(JaxserveError):  # an engine that is gone keeps nothing
            await self._engine.call(Engine.end_pictures)

    async def _feed(self, recent: RecentLatencies) -> None:
        clock = asyncio.get_running_loop().time
        seen: tuple[Any, ...] | None = None
        shown: dict[str, Any] = {}
        sent_at = float("-inf")
        while self._viewers and not self._is_closing():
            start = clock()
            state = (self._engine.state, self._engine.stats, self._engine.progress)
            if state != seen:
                seen, shown = state, await self._look()
            elif start - sent_at < QUIET_PERIOD_S:
                await asyncio.sleep(PERIOD_S)
                continue
            sent_at = clock()
            self._newest = event(shown | {"time": sent_at, "latency": _latency(recent)})
            for viewer in self._viewers:
                viewer.put(self._newest)
            await asyncio.sleep(max(PERIOD_S / 2, PERIOD_S - (sent_at - start)))

    def _is_closing(self) -> bool:
        """An open stream would hold up the server's end."""
        return self._engine.state in ("stopped", "dead") or (
            self._engine.state == "draining" and not self._engine.num_open
        )

    async def _look(self) -> dict[str, Any]:
        engine = self._engine
        shown: dict[str, Any] = {"state": engine.state, "model": engine.model_name, "notice": None, "picture": None}
        stats = engine.stats
        if engine.state == "ready":
            try:
                picture, stats = await engine.call(_picture_and_stats)
                shown["picture"] = await asyncio.to_thread(picture_payload, picture)
            except JaxserveError as error:
                shown["notice"] = f"No pages, lanes or prefix tree: {error}"
        elif engine.progress is not None:
            progress = engine.progress
            shown["notice"] = f"{progress.phase}, {progress.done} of {progress.total}"
        shown["stats"] = None if stats is None else stats_payload(stats)
        return shown


def _picture_and_stats(engine: Engine) -> tuple[Picture, EngineStats]:
    return engine.picture(), engine.stats()


def _latency(recent: RecentLatencies) -> dict[str, Any]:
    return {
        "window_s": WINDOW_S,
        "first_token": latency_payload(recent.first_token),
        "token_gap": latency_payload(recent.token_gap),
    }
