"""An engine in another process, over gRPC, with the face that AsyncEngine has; owns the connection to it."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, get_args, get_type_hints

import grpc

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, EngineStats
from jaxserve.errors import InvalidRequestError, JaxserveError
from jaxserve.request import SamplingParams
from jaxserve.request_limits import RequestLimits
from models.config import ModelConfig
from server.engine.commands import Job, validate
from server.engine.engine_client import Generation, LoadProgress, State, UnavailableError, is_set_within
from server.grpc import engine_pb2 as pb
from server.grpc.engine_pb2_grpc import EngineStub
from server.grpc.errors import error_of
from server.grpc.messages import from_response, to_request

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.25
CALL_TIMEOUT_S = 5.0  # of calls that take the engine no step
_STATS = get_type_hints(EngineStats)


@dataclass(kw_only=True, slots=True)
class _Open:
    """One submission whose stream is running.

    Attributes:
      params: of each sequence.
      pending: the sequences that have not ended.
    """

    generation: Generation
    params: Sequence[SamplingParams]
    pending: set[int]
    task: asyncio.Task[None] | None = field(default=None)


class RemoteEngine:
    """See EngineClient. An engine that goes away makes this one `unreachable`, and ready again when it is back."""

    def __init__(
        self, channel: Callable[[], grpc.aio.Channel], model_config: ModelConfig, *, key: str | None = None
    ) -> None:
        """Args: channel: opens the connection, on the event loop; model_config: of the checkpoint that is served."""
        self.state: State = "loading"
        self.progress: LoadProgress | None = None
        self.stats: EngineStats | None = None
        self.failure: BaseException | None = None
        self.on_step_end: Callable[[float, float], None] = lambda step_s, lag_s: None
        self._open_channel = channel
        self._model_config = model_config
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._limits: RequestLimits | None = None
        self._open: dict[str, _Open] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._ready = asyncio.Event()
        self._is_draining = False
        self._poller: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def model_name(self) -> str | None:
        return None if self._limits is None else self._limits.model_name

    @property
    def num_open(self) -> int:
        return sum(len(entry.pending) for entry in self._open.values())

    @property
    def is_stuck(self) -> bool:
        return False

    def start(self) -> None:
        self._channel = self._open_channel()
        self._stub = EngineStub(self._channel)
        self._poller = asyncio.create_task(self._poll())

    async def wait_until_ready(self) -> RequestLimits:
        await self._ready.wait()
        return self.limits()

    async def wait_until_dead(self) -> None:
        """Never returns: an engine elsewhere may always come back."""
        await asyncio.Event().wait()

    def limits(self) -> RequestLimits:
        if self.state == "ready" and self._limits is not None:
            return self._limits
        raise UnavailableError(
            {
                "loading": "the model is still loading; GET /health tells how far it is",
                "unreachable": "the engine's process cannot be reached",
            }.get(self.state, "the server is shutting down")
        )

    def submit(self, request_id: str, jobs: Sequence[Job]) -> Generation:
        limits = self.limits()
        if request_id in self._open:
            raise InvalidRequestError(f"request id {request_id!r} is already in use", param="request_id")
        validate(limits, jobs)
        params = [job.params for job in jobs for _ in range(job.params.n)]
        request = to_request(request_id, jobs)
        generation = Generation(self, request_id, [f"{request_id}-{index}" for index in range(len(params))])
        entry = _Open(generation=generation, params=params, pending=set(range(len(params))))
        self._open[request_id] = entry
        self._none_open.clear()
        entry.task = asyncio.create_task(self._receive(request, entry))
        return generation

    def abort(self, request_ids: Sequence[str]) -> None:
        name = request_ids[0].rpartition("-")[0]
        entry = self._open.get(name)
        if entry is None:
            return
        ended = entry.pending & {int(request_id.rpartition("-")[2]) for request_id in request_ids}
        entry.pending -= ended
        if entry.pending:
            for index in ended:
                self._send_abort(pb.AbortRequest(request_id=name, index=index))
        elif ended:
            self._close(name)
            assert entry.task is not None
            entry.task.cancel()  # which cancels the call, and with it what runs over there

    def cancel(self, request_id: str, index: int | None = None) -> int:
        entry = self._open.get(request_id)
        if entry is None:
            return 0
        self._send_abort(pb.AbortRequest(request_id=request_id, index=index))
        return len(entry.pending) if index is None else int(index in entry.pending)

    def abort_all(self) -> None:
        for request_id in self._open:
            self.cancel(request_id)

    async def flush(self) -> int:
        return int((await self._call(self._stub.Flush, pb.FlushRequest())).pages)

    async def pages(self) -> Mapping[str, Any]:
        reply = await self._call(self._stub.Pages, pb.PagesRequest())
        return cast(Mapping[str, Any], json.loads(reply.pages_json))

    async def call(self, work: Callable[[Engine], T]) -> T:
        raise UnavailableError("this front end runs apart from its engine, and this can only be had beside it")

    async def drain(self, timeout_s: float) -> None:
        self._is_draining = True
        self.state = "draining"
        if await is_set_within(self._none_open, timeout_s):
            return
        logger.warning("aborting %d sequences that did not end within %g s", self.num_open, timeout_s)
        self.abort_all()
        if not await is_set_within(self._none_open, CALL_TIMEOUT_S):
            self._fail_open(UnavailableError("the engine's process cannot be reached"))

    async def close(self) -> None:
        await self.drain(0.0)
        self.state = "stopped"
        self._ready.set()
        tasks = [task for task in (self._poller, *self._aborts) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    # --- one stream a submission ---

    async def _receive(self, request: Any, entry: _Open) -> None:
        request_id = request.request_id
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            async for response in call:
                index = response.index
                if not 0 <= index < len(entry.params):
                    raise ValueError(f"an output of sequence {index}; the request has {len(entry.params)}")
                output = from_response(response, f"{request_id}-{index}", entry.params[index])
                if output.finish_reason is not None:
                    entry.pending.discard(index)
                entry.generation.put((index, output))
            if entry.pending:
                entry.generation.put(UnavailableError("the engine ended the stream too soon"))
        except grpc.aio.AioRpcError as error:
            entry.generation.put(error_of(error))
        except Exception:  # whatever it is, somebody waits for these sequences to end
            logger.exception("the engine's answer was not understood; are both of one version?")
            entry.generation.put(UnavailableError("the engine's answer was not understood"))
        finally:
            call.cancel()
            if self._open.get(request_id) is entry:
                self._close(request_id)

    def _close(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        if not self._open:
            self._none_open.set()

    def _send_abort(self, request: Any) -> None:
        async def send() -> None:
            try:
                await self._stub.Abort(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:  # its stream has ended, too, and told its client
                logger.info("an abort did not reach the engine: %s", error.code())

        task = asyncio.create_task(send())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _fail_open(self, error: Exception) -> None:
        for entry in tuple(self._open.values()):
            entry.generation.put(error)
            assert entry.task is not None
            entry.task.cancel()
        self._open.clear()
        self._none_open.set()

    # --- what the engine says of itself ---

    async def _poll(self) -> None:
        while True:
            try:
                await self._look()
            except Exception as error:  # whatever it is, the next look may go well
                if not isinstance(error, JaxserveError):
                    logger.exception("the engine's answer was not understood; are both of one version?")
                elif self.state == "ready":
                    logger.warning("the engine cannot be reached: %s", error)
                self._limits, self.stats, self.progress = None, None, None
                if not self._is_draining:
                    self.state = "unreachable"
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        health = await self._call(self._stub.Health, pb.HealthRequest())
        if health.stats:
            self.stats = EngineStats(**{name: kind(health.stats.get(name, 0)) for name, kind in _STATS.items()})
        self.progress = LoadProgress(phase=health.phase, done=health.done, total=health.total) if health.total else None
        if health.state == "ready" and self._limits is None:
            info = await self._call(self._stub.ModelInfo, pb.ModelInfoRequest())
            self._limits = RequestLimits(
                config=EngineConfig.model_validate_json(info.config_json),
                model_config=self._model_config,
                num_token_ids=info.num_token_ids,
                eos_token_ids=frozenset(info.eos_token_ids),
            )
        if not self._is_draining:
            self.state = cast(State, health.state) if health.state in get_args(State) else "unreachable"
        if self.state == "ready":
            self._ready.set()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
