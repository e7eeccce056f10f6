"""Rate limits by the clock: what a key may have, when it may have more, and who is not concerned."""

import pytest

from server.security.rate_limit import Allowance, RateLimitError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(allowance: Allowance) -> float | None:
    try:
        allowance.admit()
    except RateLimitError as error:
        return error.retry_after_s
    return None


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one() -> None:
    clock = Clock()
    allowance = Allowance(6, None, clock)
    assert [refused(allowance) for _ in range(6)] == [None] * 6
    assert refused(allowance) == pytest.approx(10.0)
    clock.now = 9.0
    assert refused(allowance) == pytest.approx(1.0)
    clock.now = 10.0
    assert refused(allowance) is None
    assert refused(allowance) == pytest.approx(10.0)


def test_a_refused_request_takes_nothing() -> None:
    clock = Clock()
    allowance = Allowance(1, 60, clock)
    allowance.charge(100)
    assert refused(allowance) == pytest.approx(41.0)  # 40 overdrawn at one a second, and one to have
    clock.now = 41.0
    assert refused(allowance) is None


def test_rest_never_saves_up_more_than_a_minute() -> None:
    clock = Clock()
    allowance = Allowance(2, None, clock)
    clock.now = 10_000.0
    assert [refused(allowance) for _ in range(3)] == [None, None, pytest.approx(30.0)]


def test_less_than_one_request_a_minute_is_a_limit_as_well() -> None:
    clock = Clock()
    allowance = Allowance(0.5, None, clock)
    assert refused(allowance) is None
    assert refused(allowance) == pytest.approx(120.0)
    clock.now = 120.0
    assert refused(allowance) is None


def test_without_limits_nothing_is_refused() -> None:
    allowance = Allowance(None, None, Clock())
    allowance.charge(10**9)
    assert [refused(allowance) for _ in range(1000)] == [None] * 1000
