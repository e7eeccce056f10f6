"""Sends a load and takes the times: open loops by absolute deadlines, closed loops by users; knows no statistics.

An open loop's deadlines are all fixed before it begins. A request that the client sends late is late for the user, so
every latency counts from the deadline; a slow server, or a slow client, cannot thin out the load that measures it.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.bench.http import ClosedError, ConnectError, Exchange, HttpClient
from server.bench.reply import MAX_DETAIL, ReplyReader
from server.bench.result import Chunk, FailureKind, Result

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LEAD_S = 0.05  # from the call to the first deadline, so that it is not late already


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What one user sends, a turn after the other.

    Attributes:
      turns: bodies of OpenAI's API without `model` and `stream`. The messages of a later turn are new ones only: those
        before it and the server's replies are put in front.
      think_s: from a reply to the next turn.
    """

    turns: tuple[dict[str, Any], ...]
    think_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """Users who each wait for their reply, think, and send again; they stop beginning after `duration_s`."""

    concurrency: int
    duration_s: float | None = None
    think_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server and how it is asked.

    Attributes:
      extras: fields that every body gets where it has none of its own, such as `stream_options`.
      fields: what every body gets in place of its own.
      timeout_s: from the socket to the end of a reply.
      stall_s: the longest silence after a first token.
    """

    http: HttpClient
    model: str
    extras: dict[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    stall_s: float = 60.0


@dataclass(slots=True)
class Progress:
    """How far a run has come; read by whoever draws it."""

    total: int | None = None
    begun: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0


async def run_load(
    target: Target,
    arrivals: Sequence[float] | ClosedLoop,
    requests: Iterable[Conversation],
    *,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Sends the load and waits for the last reply; returns one Result for every request that was due, in no order.

    Args:
      arrivals: seconds after the start at which each conversation begins, ascending; or users in a closed loop.
      requests: one for each arrival; a closed loop takes them until they or its time run out.
      max_concurrency: of an open loop: others wait in the client, and their wait is counted.
    """
    run = _Run(target, progress or Progress(), max_concurrency)
    if isinstance(arrivals, ClosedLoop):
        await run.closed(arrivals, iter(requests))
    else:
        await run.open(arrivals, requests)
    return run.results


class _Run:
    def __init__(self, target: Target, progress: Progress, max_concurrency: int | None) -> None:
        self._target = target
        self._progress = progress
        self._limit = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time() + LEAD_S
        self._next_index = 0
        self.results: list[Result] = []

    async def open(self, arrivals: Sequence[float], requests: Iterable[Conversation]) -> None:
        async with asyncio.TaskGroup() as group:
            for offset, conversation in zip(arrivals, requests, strict=False):
                # Even when late, the loop gets a turn: replies are to be read while arrivals catch up.
                await asyncio.sleep(max(0.0, self._start + offset - self._loop.time()))
                group.create_task(self._converse(conversation, offset))

    async def closed(self, users: ClosedLoop, requests: Iterator[Conversation]) -> None:
        await asyncio.sleep(LEAD_S)

        async def user() -> None:
            ready = 0.0
            for conversation in requests:
                ended = await self._converse(conversation, ready)
                ready = ended + users.think_s
                if users.duration_s is not None and ready >= users.duration_s:
                    return
                if users.think_s:
                    await asyncio.sleep(max(0.0, self._start + ready - self._loop.time()))

        async with asyncio.TaskGroup() as group:
            for _ in range(users.concurrency):
                group.create_task(user())

    async def _converse(self, conversation: Conversation, due: float) -> float:
        """Sends a conversation's turns; returns when the last one ended. A failed turn ends it."""
        history: list[dict[str, Any]] = []
        for number, turn in enumerate(conversation.turns):
            if number:
                await asyncio.sleep(max(0.0, self._start + due - self._loop.time()))
            body = dict(turn)
            if "messages" in body:
                history = [*history, *body["messages"]]
                body["messages"] = history
            result = await self._request(body, due, number)
            if not result.ok:
                return result.end_s
            history = [*history, {"role": "assistant", "content": result.text}]
            due = result.end_s + conversation.think_s
        return due - conversation.think_s

    async def _request(self, body: dict[str, Any], due: float, turn: int) -> Result:
        index = self._next_index
        self._next_index += 1
        if self._limit is None:
            result = await self._send(body, index, due, turn)
        else:
            async with self._limit:
                result = await self._send(body, index, due, turn)
        self.results.append(result)
        self._progress.done += 1
        self._progress.failed += not result.ok
        self._progress.output_tokens += result.output_tokens
        return result

    async def _send(self, body: dict[str, Any], index: int, due: float, turn: int) -> Result:
        begun = self._loop.time()
        self._progress.begun += 1
        sending = _Sending(self._target)
        await sending.run(body)
        reader, exchange = sending.reader, sending.exchange
        tokens = reader.tokens()
        failure, detail = sending.failure, sending.detail
        if failure is None and not tokens.chunks:
            failure, detail = "empty", "the reply has no token"

        def since(time: float | None) -> float | None:
            return None if time is None else time - self._start

        return Result(
            index=index,
            turn=turn,
            scheduled_s=due,
            begun_s=begun - self._start,
            sent_s=since(exchange.sent_time),
            first_token_s=since(reader.first_token_time),
            end_s=sending.end_time - self._start,
            chunks=tuple(Chunk(chunk.time_s - self._start, chunk.tokens) for chunk in tokens.chunks),
            output_tokens=tokens.output_tokens,
            prompt_tokens=reader.prompt_tokens,
            cached_tokens=reader.cached_tokens,
            counted_by=tokens.counted_by,
            finish_reason=reader.finish_reason,
            status=exchange.status,
            failure=failure,
            detail=detail,
            oddities=tuple(reader.oddities),
            text=reader.content,
        )


class _Sending:
    """One request on its way: puts the exchange, the reader and the two limits of time together."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._error_body = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self.reader = ReplyReader()
        self.exchange = Exchange(self._on_body)
        self.failure: FailureKind | None = None
        self.detail = ""
        self.end_time = 0.0

    async def run(self, body: dict[str, Any]) -> None:
        path = COMPLETIONS if "prompt" in body else CHAT
        whole = {"model": self._target.model, **self._target.extras, **body, **self._target.fields, "stream": True}
        try:
            await self._target.http.start("POST", path, json.dumps(whole).encode(), self.exchange)
        except ConnectError as error:
            self.end_time = self._loop.time()
            self._fail("connect", str(error))
            return
        self._watch()
        try:
            ended_by = await self.exchange.done
        except asyncio.CancelledError:
            self.exchange.abandon()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self.exchange.on_body = _ignore  # no cycle: runs go without garbage collection
        self._judge(ended_by)

    def _on_body(self, data: bytes, time: float) -> None:
        if self._is_stream():
            self.reader.feed(data, time)
            if self.reader.is_over or self.reader.failure is not None:
                # The reply is over for the user; the connection reads on by itself and may be used again.
                self.end_time = time
                self.exchange.finish()
                if self.reader.failure is not None:
                    self.exchange.abandon()
        elif len(self._error_body) < MAX_DETAIL:
            self._error_body += data[:MAX_DETAIL]

    def _is_stream(self) -> bool:
        return self.exchange.status == 200 and self.exchange.headers.get("content-type", "").lower().startswith(
            "text/event-stream"
        )

    def _watch(self) -> None:
        """Looks at the two limits when the nearer one may have passed."""
        sent, last = self.exchange.sent_time, self.exchange.last_time
        assert sent is not None
        assert last is not None
        now = self._loop.time()
        due = sent + self._target.timeout_s
        if now >= due:
            self._give_up("timeout", f"not over after {self._target.timeout_s:g} s")
            return
        if self.reader.first_token_time is not None:
            stalls = last + self._target.stall_s
            if now >= stalls:
                self._give_up("stalled", f"silent for {self._target.stall_s:g} s after a token")
                return
            due = min(due, stalls)
        else:
            due = min(due, now + self._target.stall_s)
        self._timer = self._loop.call_at(due, self._watch)

    def _give_up(self, failure: FailureKind, detail: str) -> None:
        self._fail(failure, detail)
        self.exchange.finish()
        self.exchange.abandon()

    def _judge(self, error: Exception | None) -> None:
        """Decides what the end of the exchange means."""
        now = self._loop.time() if self.end_time == 0.0 else self.end_time
        self.end_time = now
        if self.failure is not None:  # given up
            return
        if self.exchange.status not in (None, 200):
            kind: FailureKind = "rate_limited" if self.exchange.status == 429 else "http_error"
            self._fail(kind, f"{self.exchange.status}: {_message(bytes(self._error_body))}")
        elif error is not None:
            self._fail("closed_early" if isinstance(error, ClosedError) else "malformed", str(error))
        elif not self._is_stream():
            kind_of = self.exchange.headers.get("content-type", "without a content-type")
            self._fail("malformed", f"the reply is {kind_of}, no text/event-stream")
        else:
            self.reader.close(now)
            if self.reader.failure is not None:
                self._fail(self.reader.failure, self.reader.detail)

    def _fail(self, failure: FailureKind, detail: str) -> None:
        self.failure = failure
        self.detail = detail[:MAX_DETAIL]


def _ignore(data: bytes, time: float) -> None:
    """What comes after the end of a reply."""


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's form, else its text."""
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return text or "no reason given"
