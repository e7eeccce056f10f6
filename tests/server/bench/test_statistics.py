"""Percentiles are measured values, and their intervals cover as often as they say."""

import numpy as np
import pytest

from server.bench.statistics import PERCENTILES, distribution


def test_percentiles_are_the_nearest_rank() -> None:
    of = distribution(list(range(1, 101)))
    assert of is not None
    assert [of.percentile(percent).value for percent in PERCENTILES] == [50, 90, 95, 99]
    assert (of.count, of.mean, of.max) == (100, 50.5, 100)
    few = distribution([3.0, 1.0, 2.0])
    assert few is not None
    assert [few.percentile(percent).value for percent in PERCENTILES] == [2, 3, 3, 3]
    assert distribution([]) is None


def test_weights_count_as_repeats_do() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.exponential(size=200), rng.integers(0, 5, size=200)
    weighted = distribution(values.tolist(), weights=weights.tolist())
    repeated = distribution(np.repeat(values, weights).tolist())
    assert weighted is not None
    assert repeated is not None
    for percent in PERCENTILES:
        assert weighted.percentile(percent).value == repeated.percentile(percent).value
    assert weighted.count == repeated.count
    assert weighted.mean == pytest.approx(repeated.mean)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    truth = -np.log(0.1)  # p90 of an exponential
    trials, hits = 60, 0
    for trial in range(trials):
        of = distribution(rng.exponential(size=150).tolist(), seed=trial)
        assert of is not None
        hits += of.p90.low <= truth <= of.p90.high
    assert 0.85 <= hits / trials <= 1.0


def test_values_of_one_request_are_no_independent_witnesses() -> None:
    """Ten requests of a hundred equal gaps say as much as ten values, not as a thousand."""
    rng = np.random.default_rng(2)
    levels = rng.exponential(size=10)
    values = np.repeat(levels, 100)
    owners = np.repeat(np.arange(10), 100)
    together = distribution(values.tolist(), owners=owners.tolist())
    apart = distribution(values.tolist())
    assert together is not None
    assert apart is not None
    assert together.p50.value == apart.p50.value
    assert together.p50.high - together.p50.low > 2 * (apart.p50.high - apart.p50.low)
