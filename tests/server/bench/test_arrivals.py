"""Arrivals: exact where they are constant, and with the moments of their process where they are drawn."""

import numpy as np
import pytest

from server.bench.arrivals import Rate, draw_arrivals, parse_rate
from server.bench.errors import BenchError


def steady(rate: float, duration_s: float | None = None) -> Rate:
    return Rate(start=rate, end=rate, duration_s=duration_s)


def test_constant_arrivals_are_evenly_apart_from_zero_on() -> None:
    assert draw_arrivals(steady(4), count=5, process="constant") == (0, 0.25, 0.5, 0.75, 1.0)
    assert draw_arrivals(steady(4, 1.0), process="constant") == (0, 0.25, 0.5, 0.75)
    assert draw_arrivals(steady(4, 1.0), count=2, process="constant") == (0, 0.25)


@pytest.mark.parametrize(("process", "burstiness", "variation"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0)])
def test_drawn_arrivals_have_their_rate_and_their_variation(process: str, burstiness: float, variation: float) -> None:
    arrivals = draw_arrivals(steady(50), count=40_000, process=process, burstiness=burstiness, seed=3)  # type: ignore[arg-type]
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    # The coefficient of variation of a gamma's gaps is 1/sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_a_ramp_is_at_each_rate_when_it_should_be() -> None:
    arrivals = np.array(draw_arrivals(Rate(start=10, end=30, duration_s=100), process="constant"))
    assert len(arrivals) == 2000  # 20 a second on the mean
    assert ((arrivals >= 0) & (arrivals < 10)).sum() == pytest.approx(110, abs=1)  # from 10 to 12 a second
    assert ((arrivals >= 90) & (arrivals < 100)).sum() == pytest.approx(290, abs=1)
    falling = np.array(draw_arrivals(Rate(start=20, end=0, duration_s=10), process="constant"))
    assert len(falling) == 100
    assert (falling < 5).sum() == pytest.approx(75, abs=1)
    rising = draw_arrivals(Rate(start=0, end=20, duration_s=10), process="constant")
    assert rising[0] == 0
    assert len(rising) == 100


def test_a_seed_gives_the_same_arrivals_and_another_others() -> None:
    first, same, other = (draw_arrivals(steady(5), count=20, seed=seed) for seed in (1, 1, 2))
    assert first == same != other


def test_all_at_once_is_a_rate() -> None:
    assert draw_arrivals(parse_rate("inf", None), count=3) == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "such as 4"),
        ("0", "positive"),
        ("-1", "positive"),
        ("nan", "positive"),
        ("1..inf", "positive"),
        ("1..5", "--duration"),
    ],
)
def test_a_rate_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_rate(text, None)


def test_arrivals_without_an_end_are_refused() -> None:
    with pytest.raises(BenchError, match="--requests"):
        draw_arrivals(steady(1))
    with pytest.raises(BenchError, match="--requests"):
        draw_arrivals(parse_rate("inf", 5.0))
    with pytest.raises(BenchError, match="lower --rate"):
        draw_arrivals(steady(1e9, 1e9))
