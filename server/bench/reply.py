"""Reads one streamed reply of OpenAI's API into arrivals of tokens; knows neither sockets nor the run it belongs to.

How many tokens a chunk carries is nowhere said by the API alone, so the best evidence that a server gives is taken: a
running usage, token ids, logprobs, and at last the final usage spread over the chunks by the length of their text.
"""

import json
from dataclasses import dataclass
from typing import Any, TypeGuard

from server.bench.result import Chunk, CountedBy, FailureKind
from server.bench.sse import Event, EventParser, EventTooLongError

# Where a chunk's delta may hold generated text that is not the answer, by the names that servers use.
_OTHER_CHANNELS = ("reasoning_content", "reasoning", "refusal")
MAX_DETAIL = 300
# A server may count a token that it never sends (the end of the sequence), or send one that it does not count.
TOLERANCE = 1


@dataclass(slots=True)
class _Piece:
    """One chunk that brought something generated."""

    time: float
    text: str
    ids: int | None
    logprobs: int | None
    usage: int | None  # completion tokens so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What a reply came to. `chunks` has the times that were fed."""

    chunks: tuple[Chunk, ...]
    output_tokens: int
    counted_by: CountedBy


class ReplyReader:
    """Takes the bytes of one reply as they come.

    Attributes:
      is_over: `[DONE]` was read.
      failure, detail: what went wrong inside the stream, as soon as it did.
      first_token_time: of the first generated token of any channel.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.failure: FailureKind | None = None
        self.detail = ""
        self.first_token_time: float | None = None
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.oddities: list[str] = []
        self._parser = EventParser()
        self._pieces: list[_Piece] = []
        self._content: list[str] = []
        self._completion_tokens: int | None = None
        self._finish_time: float | None = None

    @property
    def content(self) -> str:
        """The answer itself, without reasoning and tool calls: what a conversation goes on from."""
        return "".join(self._content)

    def feed(self, data: bytes, time: float) -> None:
        try:
            events = self._parser.feed(data)
        except EventTooLongError as error:
            self._fail("malformed", str(error))
            return
        for event in events:
            self._read(event, time)

    def close(self, time: float) -> None:
        """The body ended; decides whether that was the end of the reply."""
        for event in self._parser.close():
            self._odd("the last event was not ended")
            self._read(event, time)
        if self.failure is not None or self.is_over:
            return
        if self.finish_reason is None:
            self._fail("closed_early", "the stream ended with neither a finish_reason nor [DONE]")
        else:
            self._odd("no [DONE]")

    def tokens(self) -> Tokens:
        """Counts what came; call it once, after the end. Adds what was odd about the counts to `oddities`."""
        if not self._pieces and self._finish_time is not None and self._completion_tokens:
            # The model ended at once, or its tokens have no text: they were there when the end was.
            self._pieces.append(_Piece(self._finish_time, "", None, None, None))
            self.first_token_time = self._finish_time
        if not self._pieces:
            return Tokens(chunks=(), output_tokens=0, counted_by="chunks")
        seen, counted_by = self._counts()
        claimed = self._completion_tokens
        if claimed is None:
            if self.is_over:
                self._odd("no usage")
        elif counted_by is None:
            if self._is_plausible(claimed):
                seen = _spread(claimed, [len(piece.text) for piece in self._pieces])
                counted_by = "chunks" if claimed == len(seen) else "text"
            else:
                self._odd("wrong usage")
                claimed = None
        elif abs(claimed - sum(seen)) > TOLERANCE:
            self._odd("wrong usage")
            claimed = None
        chunks = tuple(Chunk(piece.time, count) for piece, count in zip(self._pieces, seen, strict=True) if count)
        return Tokens(
            chunks=chunks,
            output_tokens=sum(seen) if claimed is None else claimed,
            counted_by=counted_by or "chunks",
        )

    def _counts(self) -> tuple[list[int], CountedBy | None]:
        """Tokens of each piece by the best evidence that all of them carry, else one each and None."""
        totals = [piece.usage for piece in self._pieces if piece.usage is not None]
        if len(totals) == len(self._pieces) and totals == sorted(totals) and totals[-1] > 0:
            # A server may send the tokens of a step in several chunks: the later ones then bring nothing new.
            return [after - before for before, after in zip([0, *totals], totals, strict=False)], "usage"
        ids = [piece.ids for piece in self._pieces if piece.ids is not None]
        if sum(ids) and len(ids) == len(self._pieces):
            return ids, "token_ids"
        logprobs = [piece.logprobs for piece in self._pieces if piece.logprobs is not None]
        if sum(logprobs) and len(logprobs) == len(self._pieces):
            return logprobs, "logprobs"
        return [1] * len(self._pieces), None

    def _is_plausible(self, claimed: int) -> bool:
        """Whether so many tokens can have come: no token is less than a byte, few chunks are less than a token."""
        num_bytes = sum(len(piece.text.encode(errors="surrogatepass")) for piece in self._pieces)
        return len(self._pieces) / 2 <= claimed <= num_bytes + len(self._pieces) + TOLERANCE

    def _read(self, event: Event, time: float) -> None:
        if self.is_over or self.failure is not None:
            self._odd("data after the end")
            return
        if event.data == "[DONE]":
            self.is_over = True
            return
        try:
            chunk = json.loads(event.data)
        except (ValueError, RecursionError):
            self._fail("malformed", f"an event is not JSON: {event.data}")
            return
        if not isinstance(chunk, dict):
            self._fail("malformed", f"an event is no JSON object: {event.data}")
        elif event.kind == "error" or chunk.get("error"):
            error = chunk.get("error") or chunk
            message = error.get("message") if isinstance(error, dict) else error
            self._fail("stream_error", str(message or event.data))
        else:
            self._read_chunk(chunk, time)

    def _read_chunk(self, chunk: dict[str, Any], time: float) -> None:
        total = self._read_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                self._fail("malformed", f"a choice is no JSON object: {choice}")
                return
            content, others = _generated_text(choice)
            self._content.append(content)
            text = content + others
            ids = choice.get("token_ids")
            logprobs = _num_logprobs(choice.get("logprobs"))
            num_ids = len(ids) if isinstance(ids, list) else None
            if text or num_ids or logprobs:
                self._pieces.append(_Piece(time, text, num_ids, logprobs, total))
                if self.first_token_time is None:
                    self.first_token_time = time
            if choice.get("finish_reason") is not None:
                self.finish_reason = str(choice["finish_reason"])
                self._finish_time = time

    def _read_usage(self, usage: Any) -> int | None:
        """Keeps what can be true of a usage; returns its completion tokens."""
        if not isinstance(usage, dict):
            return None
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if not _is_count(completion) or not (prompt is None or _is_count(prompt)):
            self._odd("wrong usage")
            return None
        if self._completion_tokens is not None and completion < self._completion_tokens:
            self._odd("wrong usage")
        self._completion_tokens = completion
        self.prompt_tokens = prompt
        if cached is not None:
            if _is_count(cached) and prompt is not None and cached <= prompt:
                self.cached_tokens = cached
            else:
                self._odd("wrong usage")
        return completion

    def _odd(self, what: str) -> None:
        if what not in self.oddities:
            self.oddities.append(what)

    def _fail(self, failure: FailureKind, detail: str) -> None:
        self.failure = failure
        self.detail = detail[:MAX_DETAIL]


def _generated_text(choice: dict[str, Any]) -> tuple[str, str]:
    """What the model wrote in this chunk: the answer, and all other channels together."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return _text(choice.get("text")), ""
    others = [_text(delta.get(name)) for name in _OTHER_CHANNELS]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            others += [_text(function.get("name")), _text(function.get("arguments"))]
    return _text(delta.get("content")), "".join(others)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _num_logprobs(logprobs: Any) -> int | None:
    """Tokens that a choice's logprobs tell of, in the form of chats or of completions."""
    if not isinstance(logprobs, dict):
        return None
    for name in ("content", "tokens"):
        if isinstance(logprobs.get(name), list):
            return len(logprobs[name])
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _spread(total: int, lengths: list[int]) -> list[int]:
    """`total` tokens over chunks in proportion to the length of their text; one each if that is how many there are.

    `_spread(6, [4, 8, 12])` is `[1, 2, 3]`.
    """
    if total == len(lengths):
        return [1] * total
    whole = sum(lengths)
    if whole == 0:
        lengths, whole = [1] * len(lengths), len(lengths)
    counts, so_far, given = [], 0, 0
    for length in lengths:
        so_far += length
        upto = (total * so_far + whole // 2) // whole
        counts.append(upto - given)
        given = upto
    return counts
