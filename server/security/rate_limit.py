"""Owns how many requests and tokens each key may still have; knows neither keys nor HTTP."""

import time
from collections.abc import Callable
from contextvars import ContextVar

from jaxserve.errors import JaxserveError

MINUTE_S = 60.0


class RateLimitError(JaxserveError):
    """A key has used up what it may have for now.

    Attributes:
      retry_after_s: when there will be something again.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Bucket:
    """A token bucket: holds a minute's worth, fills evenly, and may be overdrawn by what is only known afterwards."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._capacity = max(1.0, per_minute)  # one that never held a whole request would admit none
        self._level = self._capacity
        self._time = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount`, at most the whole bucket, is there; 0 where it is."""
        self._level = min(self._capacity, self._level + (now - self._time) * self._per_minute / MINUTE_S)
        self._time = now
        return max(0.0, (min(amount, self._capacity) - self._level) * MINUTE_S / self._per_minute)

    def take(self, amount: float) -> None:
        self._level -= amount


class Allowance:
    """One key's buckets. Tokens are taken as they come up, so a key that overdrew waits until that is made up for."""

    def __init__(
        self, requests: float | None, tokens: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args: requests, tokens: per minute; None is without limit."""
        self._clock = clock
        self._limits = (requests, tokens)
        self._requests = None if requests is None else Bucket(requests, clock())
        self._tokens = None if tokens is None else Bucket(tokens, clock())

    def admit(self) -> None:
        """Takes one request. Raises RateLimitError, and takes nothing, where requests or tokens are used up."""
        now = self._clock()
        for bucket, limit, what in zip((self._requests, self._tokens), self._limits, _KNOBS, strict=True):
            if bucket is not None and (wait_s := bucket.wait_s(1, now)) > 0:
                raise RateLimitError(f"this key may have {limit:g} {what[0]} a minute ({what[1]})", wait_s)
        if self._requests is not None:
            self._requests.take(1)

    def charge(self, num_tokens: int) -> None:
        """Takes tokens of a prompt or an output."""
        if self._tokens is not None:
            self._tokens.wait_s(0, self._clock())
            self._tokens.take(num_tokens)


_KNOBS = (
    ("requests", "server.security.requests_per_minute"),
    ("tokens", "server.security.tokens_per_minute"),
)

# Of the request that the running task answers: set once it is admitted, charged by whatever computes its tokens.
ALLOWANCE: ContextVar[Allowance | None] = ContextVar("ALLOWANCE", default=None)


def charge(num_tokens: int) -> None:
    """Charges the key of the request being answered, where it has a limit."""
    allowance = ALLOWANCE.get()
    if allowance is not None:
        allowance.charge(num_tokens)
