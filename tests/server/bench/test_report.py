"""What a run is summed up to, from requests of which every number is known."""

import math
from dataclasses import replace
from typing import Any

import pytest
from scripted_server import delta, plain, scripted_server, stream, usage
from virtual_time import run_virtual

from server.bench.http import HttpClient
from server.bench.load import ClosedLoop, Conversation, Target
from server.bench.measure import Load, Run, measure
from server.bench.report import Report, summarize
from server.bench.result import Chunk, Result
from server.bench.slo import Promise, format_seconds, parse_promise, parse_seconds
from server.bench.watch import ServerSample, Watch, parse_metrics


def result(index: int, due: float, *chunks: tuple[float, int], end: float, **fields: Any) -> Result:
    return Result(
        index=index,
        scheduled_s=due,
        begun_s=due,
        sent_s=due,
        first_token_s=chunks[0][0] if chunks else None,
        chunks=tuple(Chunk(*chunk) for chunk in chunks),
        end_s=end,
        **{"output_tokens": sum(tokens for _, tokens in chunks), "prompt_tokens": 10, **fields},
    )


RESULTS = [
    result(0, 0.0, (0.1, 1), (0.2, 1), (0.4, 4), end=0.5, cached_tokens=5),
    result(1, 0.5, (0.9, 1), (1.0, 1), end=1.0, cached_tokens=0),
    result(2, 1.0, (1.1, 1), end=4.0, failure="stalled", detail="silent"),
    result(3, 1.5, end=1.51, failure="rate_limited", status=429, detail="slow down"),
]


def report_of(results: list[Result], watch: Watch | None = None, **options: Any) -> Report:
    defaults: dict[str, Any] = {"server": "s", "model": "m", "load": "l", "level": 1.0, "is_open": True}
    return summarize(results, watch or Watch(), **{**defaults, **options})


def test_failures_are_in_no_latency_and_in_no_rate() -> None:
    report = report_of(RESULTS)
    assert (report.requests, report.succeeded, report.failure_share) == (4, 2, 0.5)
    assert report.failures == {"stalled": 1, "rate_limited": 1}
    assert report.failure_details == {"stalled": "silent", "rate_limited": "slow down"}
    ttft = report.latencies.ttft
    assert ttft is not None
    assert (ttft.count, ttft.p50.value, ttft.max) == (2, pytest.approx(0.1), pytest.approx(0.4))
    assert report.window_s == 4.0  # the stalled request held its connection until then
    assert report.requests_per_s == pytest.approx(2 / 4)
    assert report.output_tokens_per_s == pytest.approx(8 / 4)
    assert report.total_tokens_per_s == pytest.approx(28 / 4)
    assert any("2 of 4 requests failed" in warning for warning in report.warnings)


def test_token_gaps_are_weighted_by_tokens() -> None:
    gaps = report_of(RESULTS).latencies.token_gap
    assert gaps is not None
    # 100 ms once, 50 ms four times (200 ms for four tokens), 100 ms once.
    assert (gaps.count, gaps.p50.value, gaps.max) == (6, pytest.approx(0.05), pytest.approx(0.1))
    assert gaps.mean == pytest.approx(0.4 / 6)


def test_goodput_is_of_requests_that_kept_every_promise() -> None:
    promises = [Promise(measure="ttft", limit_s=0.2), Promise(measure="e2e", limit_s=2.0)]
    report = report_of(RESULTS, promises=promises)
    assert report.good_share == 0.25  # of all, the failed ones too
    assert report.goodput_per_s == pytest.approx(1 / 4)
    strict = report_of(RESULTS, promises=[Promise(measure="itl", limit_s=0.09)])
    assert strict.good_share == 0.0
    assert report_of(RESULTS, promises=[Promise(measure="tpot", limit_s=0.08)]).good_share == 0.25
    assert report_of(RESULTS).good_share is None


def test_a_closed_loops_rates_are_over_its_duration() -> None:
    """What comes while the last replies drain is no throughput of the load."""
    results = [result(0, 0.0, (0.5, 1), (1.0, 1), (1.5, 2), end=1.5), result(1, 0.0, (0.5, 1), end=0.9)]
    report = report_of(results, is_open=False, duration_s=1.0)
    assert report.window_s == 1.0
    assert report.requests_per_s == 1.0
    assert report.output_tokens_per_s == 3.0
    assert report.offered_rate is None


def test_the_achieved_rate_is_that_of_what_was_taken_up() -> None:
    late = [replace(result(i, i / 10, (9.0, 1), end=9.0), begun_s=i / 8) for i in range(5)]
    report = report_of(late)
    assert report.offered_rate == pytest.approx(10)
    assert report.achieved_rate == pytest.approx(8)
    assert any("achieved 8.00 requests/s of the 10.00 offered: -20.0%" in warning for warning in report.warnings)
    assert report_of(RESULTS).warnings == report_of(RESULTS, is_open=False).warnings  # on time: no word of it


def test_replies_that_end_before_their_length_are_told_where_length_was_asked_for() -> None:
    ended = [replace(RESULTS[0], finish_reason="stop"), replace(RESULTS[1], finish_reason="length")]
    assert any("1 of 2 replies ended before" in warning for warning in report_of(ended, full_length=True).warnings)
    assert report_of(ended).warnings == report_of(ended[1:], full_length=True).warnings == ()


def test_the_cached_share_is_of_prompts_that_tell() -> None:
    assert report_of(RESULTS).cached_share == 0.25
    assert report_of([replace(RESULTS[0], cached_tokens=None)]).cached_share is None


def test_a_client_that_was_late_or_busy_is_told_to_be_the_limit() -> None:
    assert report_of(RESULTS, Watch(lags_s=[0.001] * 100, cpu_shares=[0.5])).client.limits == ()
    late = report_of(RESULTS, Watch(lags_s=[0.05] * 100, cpu_shares=[0.5]))
    assert late.client.limits == ("its event loop was 50 ms late at p99",)
    assert any("the client was the limit" in warning for warning in late.warnings)
    assert report_of(RESULTS, Watch(lags_s=[0.0], cpu_shares=[0.97])).client.limits == ("it kept one core 97% busy",)


def test_the_servers_counters_are_told_as_what_changed() -> None:
    def sample(at: float, **values: float) -> ServerSample:
        return ServerSample(time_s=at, values=values)

    watch = Watch(
        samples=[
            sample(0, num_preemptions_total=4, compilations_after_ready_total=1, num_requests_waiting=0),
            sample(1, num_preemptions_total=5, compilations_after_ready_total=1, num_requests_waiting=9),
            sample(
                2,
                num_preemptions_total=7,
                compilations_after_ready_total=3,
                num_requests_waiting=2,
                request_queue_time_seconds_sum=3.0,
                request_queue_time_seconds_count=6.0,
            ),
        ]
    )
    report = report_of(RESULTS, watch)
    assert report.server_change is not None
    assert report.server_change.preemptions == 3
    assert report.server_change.compilations_after_ready == 2
    assert report.server_change.queue_mean_s == 0.5
    assert report.server_change.max_waiting == 9
    assert report.server_change.max_kv_usage is None
    assert "the server compiled 2 programs in traffic" in report.warnings


def test_metrics_are_read_by_either_prefix_and_summed() -> None:
    text = """# HELP vllm:num_preemptions_total text
vllm:num_preemptions_total{engine="0",model_name="a } b"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4
jaxserve:compilations_total 7
jaxserve:time_to_first_token_seconds_bucket{le="1"} 5
python_info{version="3"} 1
jaxserve:broken{a="b"} many
"""
    assert parse_metrics(text) == {"num_preemptions_total": 7.0, "compilations_total": 7.0}


def test_an_empty_run_is_summed_up_too() -> None:
    report = report_of([])
    assert (report.requests, report.failure_share, report.latencies.ttft) == (0, 0.0, None)


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("0.5", 0.5), ("80us", 8e-5), ("2m", 120)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


def test_promises_are_written_as_they_are_read() -> None:
    promise = parse_promise("ttft_p95=500ms")
    assert (promise.measure, promise.percent, promise.limit_s) == ("ttft", 95, 0.5)
    assert str(promise) == "ttft_p95=500 ms"
    assert [format_seconds(value) for value in (0, 1e-4, 0.02, 0.1874, 0.9996, 12.34, 1234)] == [
        "0 µs",
        "100 µs",
        "20.0 ms",
        "187 ms",
        "1.00 s",
        "12.3 s",
        "1234 s",
    ]


def test_a_measurement_has_its_warmup_apart_and_watches_the_server() -> None:
    script = stream([(100, delta("a")), (100, delta(finish="stop")), (100, usage(9, 1))], 100)
    body = {"messages": [{"role": "user", "content": "Hi"}], "script": script}
    bad = {**body, "script": [(1, plain(500, "warming up"))]}

    async def run() -> tuple[Run, int]:
        async with scripted_server() as server:
            server.metrics = "jaxserve:num_requests_running 1\n"
            http = HttpClient(server.url)
            load = Load(
                name="2 users",
                level=2,
                arrivals=ClosedLoop(concurrency=2, duration_s=2.95),
                requests=(Conversation(turns=(body,)) for _ in iter(int, 1)),
                warmup=[Conversation(turns=(bad,))] * 3,
            )
            done = await measure(Target(http=http, model="m", extras={}), load, server="s")
            await http.close()
            return done, len(server.bodies)

    done, num_bodies = run_virtual(run())
    assert (done.report.requests, done.report.failures) == (60, {})
    assert num_bodies == 63
    assert done.report.output_tokens_per_s == pytest.approx(58 / 2.95)
    assert len(done.watch.samples) == 5  # before, at each of three seconds, after
    assert done.report.server_change is not None
    assert done.report.server_change.max_running == 1
    assert math.isclose(done.report.latencies.ttft.p99.value, 0.1, abs_tol=1e-6)  # type: ignore[union-attr]
