"""Percentiles with the interval that chance leaves them in; knows nothing of requests.

A percentile is the smallest value that enough of the weight does not exceed (nearest rank), so it always is one that
was measured. Its interval is a bootstrap of whole requests: the tokens of one reply share their fate, and drawing them
one by one would make a run of a hundred replies look like one of ten thousand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 95, 99)
CONFIDENCE = 0.95
# Draws of the bootstrap: as many as that much work allows, and never so few that the interval's own ends are noise.
_MOST_DRAWS, _LEAST_DRAWS, _WORK = 1000, 200, 20_000_000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A percentile and the interval in which it lies with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Of one measure; `count` is how many values it is of (tokens, for gaps between tokens)."""

    count: int
    mean: float
    p50: Estimate
    p90: Estimate
    p95: Estimate
    p99: Estimate
    max: float

    def percentile(self, percent: int) -> Estimate:
        """One of `PERCENTILES`."""
        estimate: Estimate = getattr(self, f"p{percent}")
        return estimate


def distribution(
    values: Sequence[float],
    *,
    weights: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
    seed: int = 0,
) -> Distribution | None:
    """None of no values.

    Args:
      weights: how often each value counts; once if not given.
      owners: the request of each value, by any number; each value its own if not given.
    """
    if not len(values):
        return None
    order = np.argsort(np.asarray(values, np.float64), kind="stable")
    ordered = np.asarray(values, np.float64)[order]
    weight = np.ones(len(ordered), np.int64) if weights is None else np.asarray(weights, np.int64)[order]
    ids = order if owners is None else np.unique(np.asarray(owners), return_inverse=True)[1][order]
    points = _percentiles(ordered, weight)
    lows, highs = _intervals(ordered, weight, ids, np.random.default_rng(seed))
    estimates = {
        f"p{percent}": Estimate(value=points[i], low=min(lows[i], points[i]), high=max(highs[i], points[i]))
        for i, percent in enumerate(PERCENTILES)
    }
    return Distribution(
        count=int(weight.sum()),
        mean=float(np.average(ordered, weights=weight)),
        max=float(ordered[-1]),
        **estimates,
    )


def _percentiles(ordered: Floats, weights: npt.NDArray[np.int64]) -> list[float]:
    """Nearest rank of each of `PERCENTILES`."""
    below = np.cumsum(weights)
    # In whole numbers, so that no rounding decides.
    ranks = [-(-int(below[-1]) * percent // 100) for percent in PERCENTILES]
    return [float(value) for value in ordered[np.searchsorted(below, ranks)]]


def _intervals(
    ordered: Floats, weights: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], rng: np.random.Generator
) -> tuple[list[float], list[float]]:
    num_owners = int(ids.max()) + 1
    draws = max(_LEAST_DRAWS, min(_MOST_DRAWS, _WORK // len(ordered)))
    drawn = np.empty((draws, len(PERCENTILES)))
    for row in drawn:
        times = np.bincount(rng.integers(num_owners, size=num_owners), minlength=num_owners)[ids] * weights
        # An owner without weight may be all that was drawn.
        row[:] = _percentiles(ordered, times) if times.any() else np.nan
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.nanpercentile(drawn, [tail, 100 - tail], axis=0)
    return low.tolist(), high.tolist()
