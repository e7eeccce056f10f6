"""Owns the engine's thread and hands its outputs to coroutines; knows neither HTTP nor text."""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, TypeVarTuple

from jaxserve.engine import Engine, EngineStats
from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError
from jaxserve.request import RequestOutput
from jaxserve.request_limits import RequestLimits
from models.errors import ModelError
from server.engine.commands import Abort, Add, Call, Command, Job, apply, checked_pages, coming, validate
from server.engine.engine_client import Generation, LoadProgress, State, UnavailableError, is_set_within

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Args = TypeVarTuple("Args")
T = TypeVar("T")

# An aborted request ends with the engine's next step; a device that needs longer than this for one step hangs.
ABORT_TIMEOUT_S = 10.0

# Steps whose outputs the event loop has yet to hand out; the engine waits when it is so far ahead, instead of queueing
# without end for a loop that cannot keep up.
MAX_STEPS_AHEAD = 16

# How often the watchdog looks, as a share of what it allows; a stuck step is found at most so much later.
WATCH_SHARE = 0.1


class StuckStepError(EngineDeadError):
    """A step took longer than `server.step_timeout_s`: the device hangs, and nothing can wake its thread."""


class _LoadingCancelled(Exception):
    """Leaves `Engine.load` from inside its progress callback: a compilation itself cannot be interrupted."""


class AsyncEngine:
    """The engine on a thread of its own, seen from one event loop.

    Every method belongs to that loop. The thread and the loop share two things: a queue of commands under a condition,
    on which the idle thread sleeps, and `call_soon_threadsafe`, called once per step with all outputs of the step.

    Attributes:
      state: loading → ready → draining → stopped, or dead from any of them.
      progress: of loading; None once ready.
      stats: as of the last step; None until ready.
      on_step_end: called on the loop with a step's seconds, and those that its outputs then waited for the loop.
      failure: what ended the engine's thread, if it is dead.
    """

    def __init__(
        self,
        load: Callable[[Progress], Engine],
        *,
        step_timeout_s: float | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        """Args:
        load: runs on the engine's thread; it reports progress and returns a ready engine.
        step_timeout_s: a step that takes longer is taken for stuck, and the engine for dead; None waits for ever.
        request_timeout_s: a request that takes longer ends with reason "abort"; None lets it run.
        """
        self.state: State = "loading"
        self.progress: LoadProgress | None = None
        self.stats: EngineStats | None = None
        self.failure: BaseException | None = None
        self._load = load
        self._step_timeout_s = step_timeout_s
        self._request_timeout_s = request_timeout_s
        self.on_step_end: Callable[[float, float], None] = lambda step_s, lag_s: None
        self._step_start: float | None = None  # written by the thread, read by the watchdog
        self._watchdog: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._engine: Engine | None = None
        self._open: dict[str, tuple[Generation, int]] = {}
        # Sequences of each request id whose last output has not come: those that were aborted on this side, too.
        self._at_engine: Counter[str] = Counter()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._loaded = asyncio.Event()
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()  # guarded by _wake
        self._stopping = False  # guarded by _wake
        self._steps_ahead = 0  # guarded by _wake
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the thread, which loads the engine and then serves; call it from the event loop."""
        assert self._thread is None, "an engine starts once"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if self._step_timeout_s is not None:
            self._watchdog = asyncio.create_task(self._watch(self._step_timeout_s))

    async def wait_until_dead(self) -> None:
        """Returns once the engine has ended on an error; `failure` holds it."""
        await self._ended.wait()

    async def wait_until_ready(self) -> RequestLimits:
        """Returns what the loaded engine serves.

        Raises:
          EngineDeadError: loading failed; `failure` holds the cause.
          UnavailableError: the server was stopped first.
        """
        await self._loaded.wait()
        return self.limits()

    @property
    def is_stuck(self) -> bool:
        """The thread sits in a call that does not return: not even the interpreter can end it."""
        return self.state in ("dead", "stopped") and self._thread is not None and self._thread.is_alive()

    @property
    def model_name(self) -> str | None:
        """None until the model is loaded."""
        return None if self._engine is None else self._engine.limits.model_name

    @property
    def num_open(self) -> int:
        """Sequences that were accepted and have not ended."""
        return len(self._open)

    def limits(self) -> RequestLimits:
        """What the loaded engine serves; raises UnavailableError, EngineDeadError."""
        return self._ready_engine().limits

    def _ready_engine(self) -> Engine:
        if self.state == "dead":
            raise EngineDeadError(self._death())
        if self.state == "loading":
            raise UnavailableError("the model is still loading; GET /health tells how far it is")
        if self.state != "ready":
            raise UnavailableError("the server is shutting down")
        assert self._engine is not None
        return self._engine

    def submit(self, request_id: str, jobs: Sequence[Job]) -> Generation:
        """Hands jobs to the engine: all of them, or none.

        Args:
          request_id: of no other that the engine still has; sequence i runs as `{request_id}-{i}`.

        Raises:
          InvalidRequestError: one of the jobs can never be served; nothing was queued.
          QueueFullError: there is no room for them now.
          UnavailableError, EngineDeadError: see `limits`.
        """
        engine = self._ready_engine()
        if request_id in self._at_engine:
            raise InvalidRequestError(f"request id {request_id!r} is already in use", param="request_id")
        validate(engine.limits, jobs)
        with self._wake:
            on_their_way = coming(self._commands)
        lengths = [len(job.prompt_token_ids) for job in jobs for _ in range(job.params.n)]
        engine.check_room(lengths, jobs[0].params.tenant, coming=on_their_way)
        request_ids = [f"{request_id}-{index}" for index in range(len(lengths))]
        generation = Generation(self, request_id, request_ids)
        names = iter(request_ids)
        adds = [Add(request_ids=tuple(islice(names, job.params.n)), job=job) for job in jobs]
        self._open.update({name: (generation, index) for index, name in enumerate(request_ids)})
        self._none_open.clear()
        self._at_engine[request_id] = len(request_ids)
        self._send(adds)
        if self._request_timeout_s is not None:
            generation.expire_after(self._request_timeout_s)
        return generation

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends sequences whose outputs nobody awaits any more; their pages return with the engine's next step."""
        self._send([Abort(request_id=name) for name in request_ids if self._close_request(name) is not None])

    def cancel(self, request_id: str, index: int | None = None) -> int:
        """Ends the sequences of one `submit` that still run, or one, with reason "abort"; returns how many."""
        open_ids = [
            name
            for name, (generation, number) in self._open.items()
            if generation.request_id == request_id and index in (None, number)
        ]
        self._send([Abort(request_id=name) for name in open_ids])
        return len(open_ids)

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Does `work` on the engine's thread, between two steps; raises EngineDeadError if it comes to none."""
        self._ready_engine()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._send([Call(work=work, reply=lambda result: self._post(_resolve, future, result))])
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise EngineDeadError(f"the engine made no step for {ABORT_TIMEOUT_S:g} s") from None

    async def flush(self) -> int:
        """Forgets every cached page; returns how many there were."""
        return await self.call(lambda engine: engine.flush_cache())

    async def pages(self) -> Mapping[str, Any]:
        """See EngineClient."""
        return await self.call(checked_pages)

    def abort_all(self) -> None:
        """Ends every open request with reason "abort", which their clients are told."""
        self._send([Abort(request_id=request_id) for request_id in self._open])

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, waits for the open ones, and after `timeout_s` ends those left with reason "abort"."""
        if self.state == "ready":
            self.state = "draining"
        if await is_set_within(self._none_open, timeout_s):
            return
        logger.warning("aborting %d requests that did not end within %g s", len(self._open), timeout_s)
        self.abort_all()
        if not await is_set_within(self._none_open, ABORT_TIMEOUT_S):
            self._fail_open(f"the engine made no step for {ABORT_TIMEOUT_S:g} s and was given up")

    async def close(self) -> None:
        """Aborts what is open, stops the thread and waits for it; does nothing the second time."""
        await self.drain(0.0)
        self._stop_thread()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._thread is not None and not isinstance(self.failure, StuckStepError):
            await asyncio.to_thread(self._thread.join, ABORT_TIMEOUT_S)
        if self.state != "dead":
            self.state = "stopped"
        self._loaded.set()

    # --- the event loop's side ---

    def _send(self, commands: Sequence[Command]) -> None:
        with self._wake:
            self._commands.extend(commands)
            self._wake.notify()

    def _stop_thread(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()

    async def _watch(self, timeout_s: float) -> None:
        while self.failure is None:
            await asyncio.sleep(timeout_s * WATCH_SHARE)
            start = self._step_start
            if start is not None and time.monotonic() - start > timeout_s:
                error = StuckStepError(f"a step took more than {timeout_s:g} s (server.step_timeout_s)")
                logger.critical("%s; the device is taken for hung", error)
                self._stop_thread()  # should the step return after all
                self._on_death(error)

    def _close_request(self, request_id: str) -> tuple[Generation, int] | None:
        entry = self._open.pop(request_id, None)
        if not self._open:
            self._none_open.set()
        return entry

    def _leave_engine(self, name: str) -> None:
        request_id = name.rpartition("-")[0]
        self._at_engine[request_id] -= 1
        if not self._at_engine[request_id]:
            del self._at_engine[request_id]

    def _on_progress(self, progress: LoadProgress) -> None:
        self.progress = progress

    def _on_ready(self, engine: Engine, stats: EngineStats) -> None:
        self._engine = engine
        self.stats = stats
        self.progress = None
        if self.state == "loading":
            self.state = "ready"
        self._loaded.set()

    def _on_step(
        self,
        outputs: Sequence[RequestOutput],
        refused: Sequence[tuple[str, JaxserveError]],
        stats: EngineStats,
        times: tuple[float, float] | None,
    ) -> None:
        """Args: times: when the step began and ended; None where there was none to make."""
        with self._wake:
            self._steps_ahead -= 1
            self._wake.notify()
        if times is not None:
            start, end = times
            self.on_step_end(end - start, time.monotonic() - end)
        self.stats = stats
        for output in outputs:
            request_id = output.request_id
            if output.finish_reason is not None:
                self._leave_engine(request_id)
                entry = self._close_request(request_id)
            else:
                entry = self._open.get(request_id)
            if entry is not None:  # None: the client left, or a stop string ended it
                generation, index = entry
                generation.put((index, output))
        for request_id, error in refused:
            self._leave_engine(request_id)
            entry = self._close_request(request_id)
            if entry is not None:
                entry[0].put(error)

    def _on_death(self, error: BaseException) -> None:
        if self.failure is not None:
            return  # what a stuck step still said when it returned
        self.failure = error
        self.state = "dead"
        self._loaded.set()
        self._ended.set()
        self._fail_open(self._death())

    def _fail_open(self, message: str) -> None:
        for generation in {id(generation): generation for generation, _ in self._open.values()}.values():
            generation.put(EngineDeadError(message))
        self._open.clear()
        self._none_open.set()

    def _death(self) -> str:
        return f"the engine ended with {type(self.failure).__name__}; the server's log has the cause"

    # --- the engine thread's side ---

    def _run(self) -> None:
        is_ready = False
        try:
            engine = self._load(self._report_progress)
            is_ready = True
            self._post(self._on_ready, engine, engine.stats())
            self._serve(engine)
        except _LoadingCancelled:
            logger.info("loading was cancelled")
        except BaseException as error:
            # What is wrong with a configuration or a checkpoint is told in one line by whoever shows `failure`.
            if is_ready or not isinstance(error, JaxserveError | ModelError):
                logger.exception("the engine's thread ended")
            self._post(self._on_death, error)

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._wake:
                while not self._stopping and (
                    self._steps_ahead >= MAX_STEPS_AHEAD or not (self._commands or engine.has_work())
                ):
                    self._wake.wait()
                if self._stopping:
                    return
                commands, self._commands = self._commands, deque()
                self._steps_ahead += 1
            refused = apply(engine, commands)
            outputs: list[RequestOutput] = []
            times = None
            if engine.has_work():
                start = self._step_start = time.monotonic()
                outputs = engine.step()
                self._step_start = None
                times = (start, time.monotonic())
            self._post(self._on_step, outputs, refused, engine.stats(), times)

    def _report_progress(self, phase: str, done: int, total: int) -> None:
        with self._wake:
            if self._stopping:
                raise _LoadingCancelled
        self._post(self._on_progress, LoadProgress(phase=phase, done=done, total=total))

    def _post(self, callback: Callable[[*Args], None], *args: *Args) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.warning("the event loop closed before the engine's thread ended")


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():  # its client may have left
        future.set_result(result)
