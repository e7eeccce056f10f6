"""What the server sees of an engine, wherever it runs: its states, and the outputs of the requests it accepted."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, TypeVar

from jaxserve.engine import Engine, EngineStats
from jaxserve.errors import JaxserveError, RequestFailedError
from jaxserve.request import RequestOutput
from jaxserve.request_limits import RequestLimits
from server.engine.commands import Job

State = Literal["loading", "ready", "draining", "stopped", "dead", "unreachable"]
T = TypeVar("T")


class UnavailableError(JaxserveError):
    """The engine takes no requests now: it is still loading, or the server is shutting down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProgress:
    """How far loading has come: `done` of `total` units of `phase`."""

    phase: str
    done: int
    total: int


class Aborts(Protocol):
    """Who can end requests."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends sequences of one submission whose outputs nobody awaits any more."""

    def cancel(self, request_id: str, index: int | None = None) -> int:
        """Ends the open sequences of one submission, or one, with reason "abort"; returns how many."""


class Generation:
    """The outputs of sequences that were accepted together, in the order the engine made them.

    Iterating yields `(index of the sequence, output)`: job 0's first, its second, …, job 1's first, …. It ends when the
    last output of each, that with a finish reason, has been seen or it was aborted here; it raises EngineDeadError if
    the engine ends first, RequestFailedError if one of them fails. Leaving the `with` block aborts what still runs.
    Belongs to the event loop; one consumer.

    Outputs of one sequence that wait while the consumer is busy are yielded as one: a loop that falls behind the engine
    then has less to do for each token, not more and more of them in its queues.
    """

    def __init__(self, engine: Aborts, request_id: str, request_ids: Sequence[str]) -> None:
        """Args: request_id: of all of them; request_ids: of each."""
        self.request_id = request_id
        self._engine = engine
        self._request_ids = request_ids
        self._pending = set(range(len(request_ids)))
        self._queue: deque[tuple[int, RequestOutput] | Exception] = deque()
        self._arrived = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None

    def expire_after(self, timeout_s: float) -> None:
        """Ends with reason "abort" what still runs by then."""
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(timeout_s, self._engine.cancel, self.request_id)

    def put(self, item: tuple[int, RequestOutput] | Exception) -> None:
        self._queue.append(item)
        self._arrived.set()

    def abort(self, index: int) -> None:
        """Ends one sequence; nothing more of it is yielded. Does nothing if it has ended."""
        if index in self._pending:
            self._pending.discard(index)
            self._engine.abort([self._request_ids[index]])

    def abort_all(self) -> None:
        pending, self._pending = self._pending, set()
        if pending:
            self._engine.abort([self._request_ids[index] for index in pending])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self.abort_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        while self._pending:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            item = self._queue.popleft()
            if isinstance(item, Exception):
                raise item
            index, output = item
            if index not in self._pending:
                continue  # on its way when the sequence was aborted
            if self._queue:
                output = _join([output, *self._take(index)])
            if output.finish_reason is not None:
                self._pending.discard(index)
            if output.finish_reason == "error":
                raise RequestFailedError(output.error or "the request failed")
            return index, output
        raise StopAsyncIteration

    def _take(self, index: int) -> Iterator[RequestOutput]:
        """The outputs of this sequence that come next in the queue; not a failure, which takes no tokens with it."""
        while self._queue:
            item = self._queue[0]
            if isinstance(item, Exception) or item[0] != index or item[1].finish_reason == "error":
                return
            self._queue.popleft()
            yield item[1]


def _join(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """What consecutive outputs of one request say together."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [output.logprobs for output in outputs if output.token_ids]
    return replace(
        outputs[-1],
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(entry for entries in logprobs for entry in entries or ()) if any(logprobs) else None,
        prompt_logprobs=outputs[0].prompt_logprobs,  # they come with the first token
        queue_s=outputs[0].queue_s,
        num_cached_tokens=max(output.num_cached_tokens for output in outputs),
    )


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for an event no longer than that; says whether it came."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True


class EngineClient(Aborts, Protocol):
    """An engine as the server uses it: on a thread of this process (AsyncEngine) or in another (RemoteEngine).

    Every method belongs to the event loop. Attributes:
      state: loading → ready → draining → stopped, or dead; unreachable is another process that may come back.
      progress: of loading; None once ready.
      stats: as last heard of; None before.
      failure: what ended the engine, if it is dead.
      model_name: None until it is known.
      num_open: sequences that were accepted and have not ended.
      is_stuck: a thread hangs that not even the interpreter can end.
      on_step_end: called with a step's seconds, and those that its outputs then waited for the loop.
    """

    state: State
    progress: LoadProgress | None
    stats: EngineStats | None
    failure: BaseException | None
    on_step_end: Callable[[float, float], None]

    @property
    def model_name(self) -> str | None: ...

    @property
    def num_open(self) -> int: ...

    @property
    def is_stuck(self) -> bool: ...

    def start(self) -> None: ...

    async def wait_until_ready(self) -> RequestLimits:
        """What it serves. Raises EngineDeadError if that will never be known, UnavailableError if it was stopped."""

    async def wait_until_dead(self) -> None: ...

    def limits(self) -> RequestLimits:
        """What it serves; raises UnavailableError, EngineDeadError unless requests are taken now."""

    def submit(self, request_id: str, jobs: Sequence[Job]) -> Generation:
        """Hands jobs to the engine, all or none.

        Raises:
          InvalidRequestError: one of them can never be served.
          QueueFullError: there is no room for them now.
          UnavailableError, EngineDeadError: see `limits`.
        """

    def abort_all(self) -> None:
        """Ends every open request with reason "abort", which their clients are told."""

    async def flush(self) -> int:
        """Forgets every cached page; returns how many there were."""

    async def pages(self) -> Mapping[str, Any]:
        """The engine's counts and its page ledger, as JSON has them; "fault" says where they do not agree, or None."""

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Does `work` on the engine's thread; raises UnavailableError where that is in another process."""

    async def drain(self, timeout_s: float) -> None: ...

    async def close(self) -> None: ...
