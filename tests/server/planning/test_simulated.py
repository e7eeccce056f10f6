"""Trials on the simulator, against what can be worked out by hand."""

import pytest
from tiny_engine import TinyOptions, tiny_config

from jaxserve.simulation.step_times import StepTime, StepTimes
from server.bench.slo import parse_promise
from server.bench.workload import Range, Workload
from server.planning.load import PlannedLoad, simulated_trace
from server.planning.search import Knee, find_knee
from server.planning.simulated import SimulatedServer
from server.planning.trial import cause_of

DECODE_S, PREFILL_S = 0.01, 0.05
FLAT = StepTimes(
    device="none",
    jax_version="0",
    model="tiny",
    config_digest="",
    block_q=16,
    host_seconds=0.0,
    steps=tuple(
        StepTime(decode_rows=8, prefill_blocks=blocks, kv_tokens=keys, seconds=PREFILL_S if blocks else DECODE_S)
        for blocks in (0, 1, 4)
        for keys in (0, 1000)
    ),
)


def load(output_tokens: int, prefix_tokens: int = 0) -> PlannedLoad:
    lengths = {"input_tokens": Range(low=16, high=16), "output_tokens": Range(low=output_tokens, high=output_tokens)}
    return PlannedLoad(workload=Workload(**lengths, prefix_tokens=prefix_tokens), least_requests=200, least_s=1.0)


def knee(promise: str, output_tokens: int, **options: int) -> Knee:
    server = SimulatedServer(tiny_config(TinyOptions(**options)), FLAT, load(output_tokens), [parse_promise(promise)])
    return find_knee(server.trial, alone=server.alone(), capacity=server.capacity())


def test_a_gap_that_only_others_prompts_break_is_named_so() -> None:
    found = knee("itl_p95=30ms", output_tokens=20)
    assert found.first_broken is not None
    assert cause_of(found.first_broken) == "prefill interference"
    # A prompt's step takes 50 ms: at the knee they may be one in twenty of a request's gaps, not more.
    assert 0 < found.rate < found.capacity


def test_a_gap_that_every_step_breaks_has_no_knee_and_blames_the_step() -> None:
    found = knee("itl_p95=9ms", output_tokens=20)
    assert found.rate == 0.0
    assert found.first_broken is found.alone
    assert cause_of(found.alone) == "decode step"


def test_a_first_token_waits_in_the_queue_where_the_batch_is_full() -> None:
    server = SimulatedServer(tiny_config(TinyOptions()), FLAT, load(20), [parse_promise("ttft_p95=200ms")])
    assert cause_of(server.trial(2 * server.capacity(), 0)) == "queue"


def test_two_rates_are_offered_the_same_requests_in_the_same_rhythm() -> None:
    one = load(4)
    slow, fast = one.arrivals(1.0, 0), one.arrivals(4.0, 0)
    assert slow == pytest.approx([4 * arrival for arrival in fast])
    assert slow[-1] == pytest.approx(len(slow) - 1)  # one a second is one a second, whatever the seed
    assert one.arrivals(1.0, 1) != pytest.approx(slow)
    lengths = [[request.prompt_length for request in simulated_trace(one, times, 0)] for times in (slow, fast)]
    assert lengths[0] == lengths[1]


def test_a_low_rate_is_not_offered_for_hours() -> None:
    traffic = PlannedLoad(workload=load(4).workload, least_requests=100, least_s=30.0)
    assert [traffic.count(rate) for rate in (100.0, 2.0, 0.5, 0.05)] == [3000, 100, 60, 20]


def test_a_shared_prefix_is_the_same_tokens_and_the_rest_is_not() -> None:
    trace = simulated_trace(load(4, prefix_tokens=32), (0.0, 0.0), 0)
    first, second = (request.prompt_token_ids or () for request in trace)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]
