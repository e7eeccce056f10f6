"""Finds the knee: the highest rate that keeps the promise; knows only trials, neither servers nor simulators.

Latency rises with the rate, so the search halves a bracket, on a logarithmic scale. Two things make it sure of its
answer with few trials: every rate is offered the same requests in the same rhythm, only faster, so that two rates
differ by nothing but the rate (common random numbers); and a trial near the limit is repeated with other requests,
until the median of the repeats decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.planning.trial import Trial, Verdict, cause_of, pooled

MOST_REPEATS = 3
# A single trial is believed if it is further from the limit than this, besides having it outside its interval: that
# interval takes requests for independent, and those of one burst share its fate.
SURE_RATIO = 1.2
# Trials begin a little below what the server can do at all, where most knees are.
FIRST_SHARE = 0.7
# Above its capacity a queue grows without end, and whether that shows depends only on how long one looks.
LAST_SHARE = 1.05
GIVE_UP_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Knee:
    """What a search found.

    Attributes:
      rate: requests per second, the highest that kept the promise; 0: none did.
      capacity: requests per second that were served with no rate set.
      trials: all of them, by rate, then in the order in which they ran.
      alone: what a single user saw; if that broke the promise for sure, no rate was tried.
    """

    rate: float
    capacity: float
    trials: tuple[Trial, ...]
    alone: Trial

    @property
    def at_knee(self) -> Trial | None:
        """A trial of the highest rate that held."""
        return next((trial for trial in self.trials if trial.rate == self.rate), None)

    @property
    def first_broken(self) -> Trial | None:
        """A trial of the lowest rate above the knee that broke; that of the single user where it broke already."""
        if self.alone.verdict == "broken":
            return self.alone
        above = [trial for trial in self.trials if trial.rate > self.rate and trial.worst_ratio > 1.0]
        return min(above, key=lambda trial: trial.rate, default=None)

    @property
    def in_doubt(self) -> tuple[float, float]:
        """Up to the first rate the promise held for sure, from the second on it broke for sure, as far as was tried."""
        rates = sorted({trial.rate for trial in self.trials})

        def all_are(rate: float, verdict: Verdict) -> bool:
            return all(trial.verdict == verdict for trial in self.trials if trial.rate == rate)

        held = [rate for rate in rates if rate <= self.rate and all_are(rate, "kept")]
        broke = [rate for rate in rates if rate > self.rate and all_are(rate, "broken")]
        return max(held, default=0.0), min(broke, default=max(self.capacity * LAST_SHARE, self.rate))


def find_knee(
    trial_of: Callable[[float, int], Trial],
    *,
    alone: Trial,
    capacity: float,
    tolerance: float = 0.05,
    bracket: tuple[float, float] | None = None,
) -> Knee:
    """The highest rate that keeps the promise, to within `tolerance` of itself.

    Args:
      trial_of: runs one trial: rate, and the number of the repeat, which chooses the requests.
      alone: what a single user sees: where that breaks the promise, no rate is tried.
      capacity: requests per second that the server serves when all come at once: no knee lies far above.
      bracket: rates between which the knee is expected, such as a simulation's; both ends are tried, not trusted.
    """
    if alone.verdict == "broken":
        return Knee(rate=0.0, capacity=capacity, trials=(), alone=alone)
    search = _Search(trial_of)
    top, bottom = capacity * LAST_SHARE, capacity * GIVE_UP_SHARE
    held, broke = 0.0, top
    if bracket is not None:
        low, high = (min(max(rate, bottom), top) for rate in bracket)
        if search.holds(high):
            held = high
        else:
            broke = high
            if search.holds(low):
                held = low
            else:
                broke = low
    rate = capacity * FIRST_SHARE if bracket is None else broke / 2
    while held == 0.0 and broke > bottom:  # down until something holds
        rate = min(rate, broke)
        if search.holds(rate):
            held = rate
        else:
            broke, rate = rate, rate / 2
    while held and broke / held > 1 + tolerance:
        middle = (held * broke) ** 0.5
        if search.holds(middle):
            held = middle
        else:
            broke = middle
    return Knee(rate=held, capacity=capacity, trials=search.all_trials(), alone=alone)


class _Search:
    """The trials so far, by rate."""

    def __init__(self, trial_of: Callable[[float, int], Trial]) -> None:
        self._trial_of = trial_of
        self._trials: dict[float, list[Trial]] = {}

    def holds(self, rate: float) -> bool:
        """Tries a rate until it is clear, or often enough."""
        trials = self._trials.setdefault(rate, [])
        while not trials or (len(trials) < MOST_REPEATS and not _is_clear(trials)):
            trials.append(self._trial_of(rate, len(trials)))
        return pooled(trials)

    def all_trials(self) -> tuple[Trial, ...]:
        return tuple(trial for rate in sorted(self._trials) for trial in self._trials[rate])


def _is_clear(trials: Sequence[Trial]) -> bool:
    """One sure trial is enough; of several, two that agree are."""
    ratios = [trial.worst_ratio for trial in trials]
    if len(trials) == 1:
        if ratios[0] > 1.0 and cause_of(trials[0]) == "client":
            return False  # it says nothing of the server
        return trials[0].verdict != "unclear" and not 1 / SURE_RATIO < ratios[0] < SURE_RATIO
    return (ratios[-2] <= 1.0) == (ratios[-1] <= 1.0)
