"""The simulator: what a trace costs by hand, the same twice, and against an engine that really waits."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, tiny_config

from jaxserve.clock import MachineClock
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import Plan
from jaxserve.simulation.null_runner import NullRunner
from jaxserve.simulation.simulator import Report, plan_keys, replay, simulate
from jaxserve.simulation.step_times import PageCopyTime, StepTime, StepTimes
from jaxserve.simulation.traces import TracedRequest, arrival_times, synthetic_trace

DECODE_S, PREFILL_S, KEY_S, HOST_S = 0.010, 0.100, 0.0001, 0.001


def flat_times(host_seconds: float = 0.0, key_s: float = 0.0, block_q: int = 16) -> StepTimes:
    """Steps with a prompt take 100 ms, others 10 ms, and each key `key_s`."""
    shapes = [(2, 0), (8, 0), (8, 1), (8, 4)]
    return StepTimes(
        device="none",
        jax_version="0",
        model="tiny",
        config_digest="",
        block_q=block_q,
        host_seconds=host_seconds,
        steps=tuple(
            StepTime(
                decode_rows=rows,
                prefill_blocks=blocks,
                kv_tokens=keys,
                seconds=(PREFILL_S if blocks else DECODE_S) + keys * key_s,
            )
            for rows, blocks in shapes
            for keys in (0, 1000)
        ),
    )


def run(trace: Sequence[TracedRequest], times: StepTimes | None = None, **options: Any) -> Report:
    return simulate(tiny_config(TinyOptions(**options)), times or flat_times(), trace)


def request(arrival_s: float, prompt: int, output: int) -> TracedRequest:
    return TracedRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output)


def test_one_request_takes_its_prompt_and_one_step_a_token() -> None:
    report = run([request(0.5, 10, 3)], flat_times(HOST_S, KEY_S))
    # The prompt's block reads 10 keys, the decodes 11 and 12; each step has its host time.
    first = PREFILL_S + 10 * KEY_S + HOST_S
    gaps = [DECODE_S + 11 * KEY_S + HOST_S, DECODE_S + 12 * KEY_S + HOST_S]
    assert report.ttft is not None
    assert report.token_gap is not None
    assert report.latency is not None
    assert report.ttft.p50 == pytest.approx(first)
    assert report.token_gap.mean == pytest.approx(sum(gaps) / 2)
    assert report.token_gap.max == pytest.approx(gaps[1])
    assert report.latency.max == pytest.approx(first + sum(gaps))
    assert report.duration_s == pytest.approx(0.5 + first + sum(gaps))
    assert report.busy_share == pytest.approx((first + sum(gaps) - 3 * HOST_S) / report.duration_s)
    assert report.output_tokens_per_s == pytest.approx(3 / report.duration_s)
    assert (report.steps, report.prompt_tokens, report.output_tokens) == (3, 10, 3)
    assert (report.pages_peak, report.running_peak, report.preemptions) == (2, 1, 0)  # 12 keys, 8 a page


def test_a_request_that_comes_in_the_middle_of_a_step_joins_the_step_after_next() -> None:
    # Steps end at 0.100, 0.110, 0.120, …; the second request comes in the one that ends at 0.120. The next step is in
    # flight already, so its prompt runs from 0.130 to 0.230 and slows one token of the first request.
    report = run([request(0.0, 10, 20), request(0.115, 10, 1)])
    late = min(report.served, key=lambda served: served.finish_s)
    assert late.arrival_s == 0.115
    assert late.first_token_s == pytest.approx(0.230)
    assert report.token_gap is not None
    assert report.token_gap.max == pytest.approx(PREFILL_S)
    assert report.duration_s == pytest.approx(0.100 + 19 * 0.010 - 0.010 + 0.100)


def test_pages_that_run_out_show_as_preemptions() -> None:
    trace = [request(0.0, 16, 40) for _ in range(8)]
    tight, ample = run(trace, num_pages=30), run(trace)
    assert tight.preemptions > 0 == ample.preemptions
    assert tight.duration_s > ample.duration_s
    assert tight.pages_peak <= tight.pages_total == 29
    assert tight.output_tokens == ample.output_tokens == 320


def test_a_request_that_can_never_be_served_is_counted_and_the_others_are_served() -> None:
    report = run([request(0.0, 190, 90), request(0.1, 10, 2)])
    assert report.refused == {"InvalidRequestError": 1}
    assert (report.requests, len(report.served), report.output_tokens) == (2, 1, 2)


def test_a_trace_of_refusals_has_no_times() -> None:
    report = run([request(0.0, 190, 90)])
    assert (report.ttft, report.token_gap, report.output_tokens_per_s, report.duration_s) == (None, None, 0.0, 0.0)


def test_the_same_trace_gives_the_same_report_as_json() -> None:
    trace = synthetic_trace(arrival_times("gamma", 20.0, 200, seed=3, cv=2.0), (1, 150), (1, 40), seed=3)
    reports = [json.dumps(asdict(run(trace, flat_times(HOST_S, KEY_S), num_pages=60))) for _ in range(2)]
    assert reports[0] == reports[1]
    assert json.loads(reports[0])["requests"] == 200


def test_arrivals_out_of_order_and_token_ids_change_nothing() -> None:
    by_length = [request(0.01 * i, 20, 5) for i in range(20)]
    by_ids = [
        TracedRequest(arrival_s=0.01 * i, prompt_token_ids=tuple(range(i, i + 20)), output_token_ids=(1, 2, 3, 4, 5))
        for i in range(20)
    ]
    assert run(by_length) == run(by_ids[::-1])


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"block_q is 16; the step times were measured with 32"):
        run([request(0.0, 1, 1)], flat_times(block_q=32))


def test_simulated_time_is_the_time_that_an_engine_with_real_waits_takes() -> None:
    options = TinyOptions()
    lengths = [(10, 12), (40, 6), (70, 9), (16, 1), (5, 20), (33, 3)]
    times = flat_times()

    def seconds(plan: Plan) -> float:
        blocks = sum(chunk.num_blocks(options.block_q) for chunk in plan.chunks)
        return times.estimate(len(plan.decodes), blocks, plan_keys(plan, options.block_q))

    runner = NullRunner(choose=lambda request, position: 7, block_q=options.block_q, step_seconds=seconds)
    engine = Engine(
        tiny_config(options), TINY_MODEL, runner, num_token_ids=NUM_TOKEN_IDS, eos_token_ids=frozenset({EOS})
    )
    trace = [request(0.0, prompt, output) for prompt, output in lengths] + [request(0.3, 20, 5)]
    real = replay(engine, trace, MachineClock())
    simulated = run(trace, times)
    assert (real.requests, len(real.served), real.output_tokens) == (7, 7, 56)
    assert real.prompt_tokens == simulated.prompt_tokens
    assert simulated.duration_s <= real.duration_s  # a real wait is never shorter
    assert simulated.duration_s == pytest.approx(real.duration_s, rel=0.5)  # the machine may be busy


def test_an_hour_of_traffic_takes_seconds() -> None:
    trace = synthetic_trace(arrival_times("poisson", 0.5, 1800, seed=0), (10, 100), (5, 50), seed=0)
    start = time.process_time()
    report = run(trace)
    assert report.duration_s > 3000
    assert time.process_time() - start < report.duration_s / 100


def test_keys_of_a_plan_are_those_its_rows_and_blocks_read() -> None:
    keys = []

    def seconds(plan: Plan) -> float:
        keys.append(plan_keys(plan, 16))
        return 0.0

    runner = NullRunner(choose=lambda request, position: 7, block_q=16, step_seconds=seconds)
    options = TinyOptions(max_num_batched_tokens=8 + 32)
    engine = Engine(tiny_config(options), TINY_MODEL, runner, num_token_ids=NUM_TOKEN_IDS, eos_token_ids=frozenset())
    engine.add("a", [1] * 40, SamplingParams(max_tokens=3))
    while engine.has_work():
        engine.step()
    # Two blocks of the prompt end at 16 and 32, the third at 40; the decodes read 41 and 42.
    assert keys == [48, 40, 41, 42]


def test_the_next_turn_of_a_chat_finds_the_last_one_in_the_cache() -> None:
    first, reply = tuple(range(40)), tuple(range(50, 66))
    trace = [
        TracedRequest(arrival_s=0.0, prompt_token_ids=first, output_token_ids=reply),
        TracedRequest(arrival_s=9.0, prompt_token_ids=first + reply + (7, 8), output_tokens=1),
    ]
    report = run(trace)
    assert report.served[1].cached_tokens == 48  # of 58; pages have 8 tokens, and the reply's last is not computed
    assert report.cached_tokens == 48


def test_limits_and_deadlines_of_the_configuration_hold_in_simulated_time() -> None:
    config = tiny_config(TinyOptions())
    limited = config.scheduler.model_copy(update={"max_queued_requests": 8})
    config = config.model_copy(update={"scheduler": limited})
    late = TracedRequest(arrival_s=0.0, prompt_tokens=9, output_tokens=40, deadline_ms=250)
    report = simulate(config, flat_times(), [late, *[request(0.1, 9, 2)] * 20])
    # Of 8 slots one is taken; 7 + 8 of the 20 that come at once find room.
    assert report.refused == {"QueueFullError": 5, "deadline": 1}
    assert len(report.served) == 15


def test_priorities_of_a_trace_reach_the_policy() -> None:
    config = tiny_config(TinyOptions(max_num_seqs=1, decode_buckets=(1,)))
    by_priority = config.scheduler.model_copy(update={"policy": "priority"})
    trace = [
        TracedRequest(arrival_s=0.001 * number, prompt_tokens=9, output_tokens=2, priority=-number)
        for number in range(6)
    ]
    report = simulate(config.model_copy(update={"scheduler": by_priority}), flat_times(), trace)
    order = [round(served.arrival_s * 1000) for served in report.served]
    assert order == [0, 5, 4, 3, 2, 1]  # the first one found nobody before it, the last one is the most urgent


def test_a_chat_that_left_the_device_comes_back_from_the_host_and_pays_for_its_copies() -> None:
    """Ten pages of 8: the first chat's are evicted by another request's before its next turn."""
    first = TracedRequest(arrival_s=0, prompt_token_ids=tuple(range(40)), output_tokens=1)
    other = TracedRequest(arrival_s=1, prompt_tokens=70, output_tokens=1)
    again = TracedRequest(arrival_s=2, prompt_token_ids=tuple(range(48)), output_tokens=1)
    trace = [first, other, again]
    # Computing a page takes seconds here, so that copying pays.
    slow = tuple(step.model_copy(update={"seconds": 100 * step.seconds}) for step in flat_times().steps)
    times = flat_times().model_copy(update={"steps": slow})
    alone = run(trace, times, num_pages=11)
    assert (alone.pages_saved, alone.pages_restored, alone.cached_tokens) == (0, 0, 8)
    free = run(trace, times, num_pages=11, host_pages=20)
    assert (free.pages_restored, free.cached_tokens) == (4, 40)
    copies = PageCopyTime(save_seconds=0.25, restore_seconds=0.5)
    paid = run(trace, times.model_copy(update={"page_copy": copies}), num_pages=11, host_pages=20)
    assert (paid.pages_saved, paid.pages_restored) == (free.pages_saved, free.pages_restored)
    assert paid.duration_s - free.duration_s == pytest.approx(0.25 * paid.pages_saved + 0.5 * paid.pages_restored)
