"""When requests are due: constant, Poisson, gamma, along a rate that may ramp; pure functions of a seed.

A process is first drawn at one arrival a second on the mean, then its clock is bent so that the wanted rate comes out.
So every process can follow every rate.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from server.bench.errors import BenchError

Process = Literal["constant", "poisson", "gamma"]
Seconds = npt.NDArray[np.float64]
MAX_ARRIVALS = 10_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Requests per second: `start` at first, `end` after `duration_s`, linear between; constant if they are equal."""

    start: float
    end: float
    duration_s: float | None = None

    def __str__(self) -> str:
        return f"{self.start:g}" if self.start == self.end else f"{self.start:g}..{self.end:g}"


def parse_rate(text: str, duration_s: float | None) -> Rate:
    """`4`, `inf`, or a ramp `1..20`, which needs a duration. Raises BenchError."""
    low, ramp, high = text.partition("..")
    try:
        start, end = float(low), float(high if ramp else low)
    except ValueError:
        raise BenchError(f"the rate is {text!r}; it must be requests per second, such as 4, or a ramp: 1..20") from None
    if not (start >= 0 and end >= 0 and start + end > 0) or (ramp and math.isinf(start + end)):
        raise BenchError(f"the rate is {text!r}; it must be positive")
    if ramp and duration_s is None:
        raise BenchError(f"the rate {text} is a ramp; say how long it takes (--duration)")
    return Rate(start=start, end=end, duration_s=duration_s)


def draw_arrivals(
    rate: Rate,
    *,
    count: int | None = None,
    process: Process = "poisson",
    burstiness: float = 1.0,
    seed: int = 0,
) -> tuple[float, ...]:
    """Seconds from the start, ascending, the first at 0; `count`, as many as `rate.duration_s` holds, or the fewer.

    Args:
      burstiness: the shape of `gamma`: at 1 it is Poisson, below 1 arrivals come in bursts, far above 1 evenly.
    """
    if count is None and rate.duration_s is None:
        raise BenchError("say how many requests (--requests) or for how long (--duration)")
    if math.isinf(rate.start):
        if count is None:
            raise BenchError("all requests at once (rate inf) need a number of them (--requests)")
        return (0.0,) * count
    most = math.inf if rate.duration_s is None else (rate.start + rate.end) / 2 * rate.duration_s
    if count is None and most > MAX_ARRIVALS:
        raise BenchError(f"{most:.0f} arrivals are more than {MAX_ARRIVALS}; lower --rate or --duration")
    rng = np.random.default_rng(seed)
    units = np.zeros(0)
    while (count is None or len(units) < count) and (not len(units) or units[-1] < most):
        wanted = count - len(units) if count is not None else math.ceil(most) + 64
        gaps = _unit_gaps(process, wanted, burstiness, rng)
        last = units[-1] if len(units) else -gaps[0]  # the first at 0
        units = np.concatenate([units, last + np.cumsum(gaps)])
    if rate.duration_s is not None:
        units = units[units < most]
    return tuple(_bend(units[:count], rate).tolist())


def _unit_gaps(process: Process, count: int, burstiness: float, rng: np.random.Generator) -> Seconds:
    """Gaps of mean 1."""
    if process == "constant":
        return np.ones(count)
    if process == "poisson":
        return rng.exponential(size=count)
    return rng.gamma(burstiness, 1 / burstiness, size=count)


def _bend(units: Seconds, rate: Rate) -> Seconds:
    """The times at which as many arrivals were due as `units` say: solves start·t + (end−start)·t²/2T = units for t."""
    if rate.start == rate.end:
        return units / rate.start
    assert rate.duration_s is not None
    slope = (rate.end - rate.start) / rate.duration_s
    # The stable form of the quadratic's root; where it is 0/0, nothing was due yet.
    root = rate.start + np.sqrt(np.maximum(rate.start**2 + 2 * slope * units, 0.0))
    return np.divide(2 * units, root, out=np.zeros_like(units), where=root > 0)
