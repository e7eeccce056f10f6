"""The search for the knee, against servers whose knee is known."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from server.bench.slo import Promise
from server.bench.statistics import Estimate
from server.planning.search import GIVE_UP_SHARE, LAST_SHARE, MOST_REPEATS, Knee, find_knee
from server.planning.trial import Evidence, Outcome, Trial, cause_of

TTFT = Promise(measure="ttft", limit_s=0.5, percent=95)
GAP = Promise(measure="itl", limit_s=0.05, percent=95)


def trial(rate: float, seconds: float, *, spread: float = 0.0, promise: Promise = TTFT, failures: float = 0.0) -> Trial:
    reached = Estimate(value=seconds, low=seconds * (1 - spread), high=seconds * (1 + spread))
    return Trial(
        rate=rate,
        requests=100,
        failure_share=failures,
        output_tokens_per_s=rate * 10,
        outcomes=(Outcome(promise=promise, reached=reached),),
    )


def knee_of(run: Callable[[float, int], Trial], *, capacity: float, tolerance: float = 0.05, **options: Any) -> Knee:
    """Of a server that is quick with a single user."""
    return find_knee(run, alone=trial(0.0, 0.1), capacity=capacity, tolerance=tolerance, **options)


def queue(capacity: float, noise: float = 0.0, seed: int = 0) -> Callable[[float, int], Trial]:
    """A server whose wait grows as a queue's does: 0.1 s alone, without bound at its capacity."""
    rng = np.random.default_rng(seed)

    def run(rate: float, repeat: int) -> Trial:
        load = min(rate / capacity, 0.999)
        return trial(rate, 0.1 / (1 - load) * math.exp(noise * rng.standard_normal()), spread=2 * noise)

    return run


@pytest.mark.parametrize("capacity", [0.3, 3.0, 4000.0])
def test_the_knee_of_a_quiet_server_is_found_to_the_tolerance(capacity: float) -> None:
    knee = knee_of(queue(capacity), capacity=capacity, tolerance=0.05)
    true = 0.8 * capacity  # 0.1 / (1 - 0.8) = 0.5
    assert true / 1.05 <= knee.rate <= true
    assert len({trial.rate for trial in knee.trials}) <= 6
    assert knee.first_broken is not None
    assert knee.first_broken.rate <= true * 1.05


def test_noise_is_answered_with_repeats_and_the_knee_stays_near() -> None:
    rates = []
    for seed in range(20):
        knee = knee_of(queue(3.0, noise=0.1, seed=seed), capacity=3.0)
        rates.append(knee.rate)
        repeats = [sum(t.rate == rate for t in knee.trials) for rate in {t.rate for t in knee.trials}]
        assert max(repeats) <= MOST_REPEATS
        assert max(repeats) > 1
    assert np.percentile(np.abs(np.array(rates) / 2.4 - 1), 90) < 0.10


def test_a_sure_trial_is_not_repeated() -> None:
    repeats: list[int] = []

    def run(rate: float, repeat: int) -> Trial:
        repeats.append(repeat)
        return trial(rate, 0.1 if rate < 1.0 else 2.0, spread=0.1)

    knee_of(run, capacity=2.0)
    assert set(repeats) == {0}


def test_a_trial_that_the_client_spoiled_is_repeated() -> None:
    def run(rate: float, repeat: int) -> Trial:
        if repeat == 0:
            return replace(trial(rate, 5.0), evidence=Evidence(client_lag_s=1.0))
        return trial(rate, 0.1)

    assert knee_of(run, capacity=2.0).rate > 2.0 / 1.05


def test_repeats_ask_for_other_requests() -> None:
    asked: list[int] = []

    def run(rate: float, repeat: int) -> Trial:
        asked.append(repeat)
        return trial(rate, 0.51 if repeat == 1 else 0.49)

    knee = knee_of(run, capacity=2.0, tolerance=1.0)
    assert asked[:3] == [0, 1, 2]
    assert knee.rate > 0, "the median decides"


def test_a_promise_that_no_rate_keeps_has_no_knee() -> None:
    knee = knee_of(lambda rate, _: trial(rate, 1.0), capacity=8.0)
    assert knee.rate == 0.0
    assert knee.at_knee is None
    assert min(t.rate for t in knee.trials) <= 2 * 8.0 * GIVE_UP_SHARE


def test_a_promise_that_a_single_user_sees_broken_is_not_searched_for() -> None:
    """At the low rates where it might hold, trials would take hours."""
    slow = trial(0.0, 0.8, spread=0.1)
    knee = find_knee(lambda rate, _: pytest.fail("a rate was tried"), alone=slow, capacity=8.0)
    assert (knee.rate, knee.trials, knee.first_broken) == (0.0, (), slow)
    assert cause_of(slow) == "prefill"
    doubtful = trial(0.0, 0.51, spread=0.1)
    assert find_knee(queue(3.0), alone=doubtful, capacity=3.0).rate > 2


def test_where_chance_decided_is_told() -> None:
    """A first token of 0.4 s, hardly slower with the rate: half a second is nowhere surely kept nor broken."""
    steep = knee_of(queue(3.0, noise=0.02), capacity=3.0)
    low, high = steep.in_doubt
    assert low <= steep.rate < high < 1.2 * low

    def flat(rate: float, repeat: int) -> Trial:
        return trial(rate, 0.4 + 0.05 * rate, spread=0.15)

    low, high = knee_of(flat, capacity=4.0).in_doubt
    assert low < 1.0  # 0.45 s and 15 % are 0.52
    assert high > 3.5  # 0.59 s less 15 % are 0.5


def test_a_server_that_always_keeps_it_is_trusted_no_further_than_its_capacity() -> None:
    knee = knee_of(lambda rate, _: trial(rate, 0.1), capacity=8.0)
    assert 8.0 <= knee.rate <= 8.0 * LAST_SHARE
    assert knee.first_broken is None


def test_failures_break_a_promise_whatever_the_latencies() -> None:
    knee = knee_of(lambda rate, _: trial(rate, 0.1, failures=0.0 if rate < 1 else 0.5), capacity=2.0)
    assert 0.95 <= knee.rate <= 1.0
    assert knee.first_broken is not None
    assert cause_of(knee.first_broken) == "failures"


@pytest.mark.parametrize("bracket", [(2.0, 3.0), (0.5, 1.0), (2.9, 3.1), (2.39, 2.41)])
def test_an_expected_bracket_is_tried_and_not_trusted(bracket: tuple[float, float]) -> None:
    knee = knee_of(queue(3.0), capacity=3.0, bracket=bracket)
    assert 2.4 / 1.05 <= knee.rate <= 2.4


@pytest.mark.parametrize(
    ("promise", "evidence", "cause"),
    [
        (TTFT, Evidence(queue_share=0.9), "queue"),
        (TTFT, Evidence(queue_share=0.1), "prefill"),
        (TTFT, Evidence(queue_share=0.9, preemptions=3), "pages"),
        (TTFT, Evidence(queue_share=0.9, page_peak=1.0), "pages"),
        (TTFT, Evidence(queue_share=0.9, device_share=0.1), "host"),
        (GAP, Evidence(median_gap_s=0.01), "prefill interference"),
        (GAP, Evidence(median_gap_s=0.04), "decode step"),
        (GAP, Evidence(median_gap_s=0.04, client_lag_s=0.03), "client"),
    ],
)
def test_what_broke_is_named_from_what_was_seen(promise: Promise, evidence: Evidence, cause: str) -> None:
    broken = trial(1.0, promise.limit_s * 2, promise=promise)
    seen = Trial(
        rate=1.0,
        requests=100,
        failure_share=0.0,
        output_tokens_per_s=1.0,
        outcomes=broken.outcomes,
        evidence=evidence,
    )
    assert cause_of(seen) == cause
