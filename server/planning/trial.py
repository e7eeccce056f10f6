"""One trial of one rate: what was promised and what came, whether the promise held, and what broke it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from server.bench.slo import Promise, format_seconds
from server.bench.statistics import Estimate

Verdict = Literal["kept", "broken", "unclear"]
Cause = Literal["client", "failures", "pages", "queue", "prefill", "prefill interference", "decode step", "host"]

MAX_FAILURE_SHARE = 0.01
# Where less of the time than this went into the device, the host was the limit.
LEAST_DEVICE_SHARE = 0.25
# A queue is at fault where it made up more than half of the wait for a first token.
QUEUE_SHARE = 0.5
FULL_PAGES = 0.97
# A load generator that is late by so much of the promise adds to what it measures.
CLIENT_LAG_SHARE = 0.25

EXPLAINED: dict[Cause, str] = {
    "client": "the load generator itself was late; nothing can be said of the server",
    "failures": "requests failed or were refused",
    "pages": "the cache ran out of pages: requests were preempted or waited for pages",
    "queue": "requests waited for a place in the running batch",
    "prefill": "reading the prompt itself took too long",
    "prefill interference": "most steps are quick enough, those that carry prompts of others are not",
    "decode step": "a step takes too long with this many requests in the batch",
    "host": "the device was mostly idle: the time went into the host's own work",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one promise: the percentile that was reached, in seconds, with its interval."""

    promise: Promise
    reached: Estimate

    @property
    def ratio(self) -> float:
        """Reached over promised: above 1 it is broken."""
        return self.reached.value / self.promise.limit_s

    def __str__(self) -> str:
        measure = str(self.promise).partition("=")[0]
        return f"{measure} {format_seconds(self.reached.value)} of {format_seconds(self.promise.limit_s)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What was seen beside the latencies, to name a cause; None where nobody told.

    Attributes:
      queue_share: of the mean time to a first token, the part before the request was admitted.
      median_gap_s: between tokens.
      page_peak: the largest share of the pages that requests held.
      device_share: of the time with requests running, the part in which the engine only waited for the device.
      client_lag_s: how late the load generator's own timers were, at the 99th percentile.
    """

    queue_share: float | None = None
    median_gap_s: float | None = None
    preemptions: float | None = None
    page_peak: float | None = None
    device_share: float | None = None
    client_lag_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One rate, offered for a while.

    Attributes:
      rate: requests per second; 0 of a single user.
      outcomes: one for each promise; none where no request succeeded.
    """

    rate: float
    requests: int
    failure_share: float
    output_tokens_per_s: float
    outcomes: tuple[Outcome, ...]
    evidence: Evidence = Evidence()

    @property
    def worst_ratio(self) -> float:
        """Of the promise that is nearest to breaking or the most broken; infinite where requests failed."""
        if self.failure_share > MAX_FAILURE_SHARE or not self.outcomes:
            return float("inf")
        return max(outcome.ratio for outcome in self.outcomes)

    @property
    def verdict(self) -> Verdict:
        """Unclear where the limit lies inside the interval of what was reached."""
        if self.worst_ratio == float("inf"):
            return "broken"
        if any(outcome.reached.low > outcome.promise.limit_s for outcome in self.outcomes):
            return "broken"
        if all(outcome.reached.high <= outcome.promise.limit_s for outcome in self.outcomes):
            return "kept"
        return "unclear"


def pooled(trials: Sequence[Trial]) -> bool:
    """Whether repeated trials of one rate kept the promise, on the whole: the median of their worst ratios."""
    ratios = sorted(trial.worst_ratio for trial in trials)
    return (ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) / 2 <= 1.0


def cause_of(trial: Trial) -> Cause:
    """What broke first in a trial that broke its promise: failures, then the client, then pages, then the rest."""
    evidence = trial.evidence
    if trial.worst_ratio == float("inf"):
        return "failures"
    worst = max(trial.outcomes, key=lambda outcome: outcome.ratio)
    if evidence.client_lag_s > CLIENT_LAG_SHARE * worst.promise.limit_s:
        return "client"
    if evidence.preemptions or (evidence.page_peak is not None and evidence.page_peak >= FULL_PAGES):
        return "pages"
    if evidence.device_share is not None and evidence.device_share < LEAST_DEVICE_SHARE:
        return "host"
    if worst.promise.measure == "ttft" or (worst.promise.measure == "e2e" and evidence.queue_share is not None):
        queued = evidence.queue_share is None or evidence.queue_share >= QUEUE_SHARE
        return "queue" if queued and trial.rate else "prefill"  # a single user waits for nobody
    quick = evidence.median_gap_s is not None and evidence.median_gap_s * 2 <= worst.promise.limit_s
    return "prefill interference" if quick else "decode step"
