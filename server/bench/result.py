"""What is known of one request once it ended: its times and its tokens; knows neither HTTP nor statistics.

All times are seconds since the run began, on the client's monotonic clock. The user's clock starts at `scheduled_s`,
when the request was to be sent, whether or not the client then managed to send it.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# How a request can fail, each told apart from the others in every report.
FailureKind = Literal[
    "connect",  # no connection: refused, unreachable, no file descriptors left
    "rate_limited",  # 429
    "http_error",  # any other status but 200
    "timeout",  # not over when its time was
    "stalled",  # silent for too long after its first token
    "stream_error",  # an error event in a stream that had begun with 200
    "closed_early",  # the reply ended before it was complete
    "malformed",  # no HTTP, no event stream or no JSON where they must be
    "empty",  # complete, and not one token in it
]
# What the tokens of each chunk were counted by, best first.
CountedBy = Literal["usage", "token_ids", "logprobs", "text", "chunks"]


class Chunk(NamedTuple):
    """Tokens that arrived together."""

    time_s: float
    tokens: int


class Gap(NamedTuple):
    """`tokens` tokens that came `seconds` apart."""

    seconds: float
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One request, from the time it was due to its end.

    Attributes:
      scheduled_s: when it was due. In an open loop that is fixed before the run; in a closed loop, and for a later turn
        of a conversation, it is when the user was ready to send it.
      begun_s: when the client took it up; later than `scheduled_s` if the client was late or held it back.
      sent_s: when its bytes went to a connected socket.
      first_token_s: the first generated token of any channel: content, reasoning or a tool call.
      end_s: the end of the reply, or the moment of the failure.
      chunks: arrivals of tokens; kept of a request that failed, too.
      output_tokens: the server's usage where it can be true, else what was counted.
      prompt_tokens, cached_tokens: the server's usage; None where it gave none.
      oddities: what was wrong with a reply that could be used nevertheless.
    """

    index: int
    scheduled_s: float
    begun_s: float
    end_s: float
    turn: int = 0
    sent_s: float | None = None
    first_token_s: float | None = None
    chunks: tuple[Chunk, ...] = ()
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counted_by: CountedBy = "chunks"
    finish_reason: str | None = None
    status: int | None = None
    failure: FailureKind | None = None
    detail: str = ""
    oddities: tuple[str, ...] = ()
    text: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float | None:
        """From when it was due to its first token: what the user waits."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def server_ttft_s(self) -> float | None:
        """From the socket to the first token: what the server answers for."""
        if self.first_token_s is None or self.sent_s is None:
            return None
        return self.first_token_s - self.sent_s

    @property
    def client_wait_s(self) -> float:
        """How long the client held it back: its own delay, or a limit on how many may run at once."""
        return self.begun_s - self.scheduled_s

    @property
    def connect_s(self) -> float | None:
        return None if self.sent_s is None else self.sent_s - self.begun_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first chunk; None of a reply that came at once."""
        later = sum(chunk.tokens for chunk in self.chunks[1:])
        return (self.chunks[-1].time_s - self.chunks[0].time_s) / later if later else None

    def token_gaps(self) -> list[Gap]:
        """One gap for every token after the first chunk; tokens that came together share their wait evenly.

        Three tokens 60 ms after the chunk before them are three gaps of 20 ms, as the server's own histogram has it.
        """
        gaps = []
        for before, chunk in zip(self.chunks, self.chunks[1:], strict=False):
            if chunk.tokens:
                gaps.append(Gap((chunk.time_s - before.time_s) / chunk.tokens, chunk.tokens))
        return gaps

    def chunk_gaps(self) -> list[float]:
        """Seconds between arrivals, however many tokens they brought: what the eye sees."""
        return [after.time_s - before.time_s for before, after in zip(self.chunks, self.chunks[1:], strict=False)]
