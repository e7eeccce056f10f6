"""Ten thousand arrivals at 500 a second: the load is kept up, and no request that a stall touched looks fast."""

import asyncio

import pytest
from server_process import server_process

from server.bench.arrivals import Rate, draw_arrivals
from server.bench.http import HttpClient
from server.bench.load import Conversation, Target
from server.bench.measure import Load, Run, measure

TOLERANCE_S = 0.25  # of a busy machine


def load_of(url: str, *, rate: float, count: int) -> Run:
    async def run() -> Run:
        http = HttpClient(url)
        body = {"messages": [{"role": "user", "content": "word " * 64}], "max_tokens": 4}
        arrivals = draw_arrivals(Rate(start=rate, end=rate), count=count, process="constant")
        load = Load(name="", level=rate, arrivals=arrivals, requests=[Conversation(turns=(body,))] * count)
        try:
            return await measure(Target(http=http, model="m", extras={}, stall_s=60.0), load, server="s")
        finally:
            await http.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("rate", "count", "stall_at_s", "stall_s"),
    [(100, 300, 1.0, 1.0), pytest.param(500, 10_000, 7.0, 5.0, marks=pytest.mark.slow)],
)
def test_the_rate_is_kept_and_a_stall_shows_in_every_request_that_it_touched(
    rate: float, count: int, stall_at_s: float, stall_s: float
) -> None:
    with server_process(stall_at_s=stall_at_s, stall_s=stall_s) as url:
        done = load_of(url, rate=rate, count=count)
    assert (done.report.requests, done.report.failures) == (count, {})
    # A reply is due 80 ms after its request; four tokens, 20 ms apart.
    stall_end = stall_at_s + stall_s
    touched = [
        result
        for result in done.results
        if stall_at_s - 0.08 + TOLERANCE_S < result.scheduled_s + 0.08 and result.scheduled_s < stall_end - TOLERANCE_S
    ]
    assert len(touched) >= rate * (stall_s - 2 * TOLERANCE_S) * 0.9
    for result in touched:
        assert result.end_s >= stall_end - TOLERANCE_S
        assert result.e2e_s >= stall_end - result.scheduled_s - TOLERANCE_S
    longest = max(result.e2e_s for result in done.results)
    assert longest >= stall_s - TOLERANCE_S
    assert done.report.latencies.e2e is not None
    share = stall_s / (count / rate)
    assert share > 0.05  # so p95 must know of it
    assert done.report.latencies.e2e.p95.value > 0.5 * stall_s
    if done.report.achieved_rate != pytest.approx(rate, rel=0.01) and done.report.client.limits:
        # It takes a quarter of a core; where others take both, the report at least says so.
        assert any("the client was the limit" in warning for warning in done.report.warnings)
        pytest.skip(f"the machine is too busy to send {rate} a second: {done.report.client.limits[0]}")
    assert done.report.achieved_rate == pytest.approx(rate, rel=0.01)
