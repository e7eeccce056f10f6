"""The profiler: it finds the times of a device that keeps known ones, and runs on a real one."""

from collections.abc import Callable

import pytest
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, drain, tiny_config, tokens_of

from jaxserve.compilations import COMPILATIONS
from jaxserve.device.buckets import StepShape
from jaxserve.engine import Engine
from jaxserve.request import SamplingParams
from jaxserve.simulation.null_runner import NullRunner
from jaxserve.simulation.profiler import RealRun, calibrated, profile
from jaxserve.simulation.simulator import simulate
from jaxserve.simulation.step_times import StepTime, StepTimes, config_digest
from jaxserve.simulation.traces import TracedRequest


def test_the_table_holds_the_times_that_a_device_keeps() -> None:
    config = tiny_config(TinyOptions())
    runner = NullRunner(
        choose=lambda request, position: 7,
        block_q=16,
        step_seconds=lambda plan: 0.002 + 0.001 * len(plan.decodes) + (0.02 if plan.chunks else 0.0),
    )
    engine = Engine(config, TINY_MODEL, runner, num_token_ids=NUM_TOKEN_IDS, eos_token_ids=frozenset({EOS}))
    times = profile(engine, budget_s=1.0).times
    assert [(shape.decode_rows, shape.prefill_blocks) for shape in times.shapes] == [(2, 0), (8, 0), (8, 1), (8, 4)]
    for rows, blocks, seconds in [(2, 0, 0.004), (8, 0, 0.010), (8, 1, 0.029)]:  # one of the 8 slots has the prompt
        keys = next(step.kv_tokens for step in times.steps if (step.decode_rows, step.prefill_blocks) == (rows, blocks))
        measured = times.of_shape(StepShape(decode_rows=rows, prefill_blocks=blocks), keys)
        assert seconds / 2 < measured < 2 * seconds + 0.01  # the machine may be busy
    assert times.config_digest == config_digest(config)


def test_a_real_engine_is_profiled_without_compiling_and_serves_on(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine(num_pages=40)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = [5, 6, 7] * 9  # several pages, which stay in the cache
    engine.add("before", prompt, params)
    before = tokens_of(drain(engine)["before"])
    compilations, told = COMPILATIONS.total, []
    result = profile(engine, budget_s=0.5, report=lambda what, done, total: told.append(done))
    assert COMPILATIONS.total == compilations
    assert told == sorted(told)
    assert told[-1] == 100
    assert result.run.steps > 5
    assert 0 <= result.run.idle_share <= 1
    assert result.run.output_tokens > 0
    assert result.times.host_seconds >= 0
    engine.check_integrity()
    assert engine.stats().pages_active == 0
    engine.add("after", prompt, params)
    assert tokens_of(drain(engine)["after"]) == before
    assert simulate(engine.config, result.times, [TracedRequest(arrival_s=0, prompt_tokens=9, output_tokens=9)]).steps


def test_keys_measured_do_not_exceed_what_the_pages_hold(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine(num_pages=17)  # 16 pages of 8 tokens for 8 requests: 16 tokens each
    times = profile(engine, budget_s=0.1).times
    assert max(step.kv_tokens for step in times.steps) <= 16 * 8


def test_an_engine_with_requests_is_not_profiled(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine()
    engine.add("a", [1], SamplingParams(max_tokens=1))
    with pytest.raises(AssertionError, match="the engine has requests"):
        profile(engine, budget_s=0.1)


def test_the_table_is_made_to_agree_with_the_real_run() -> None:
    steps = tuple(StepTime(decode_rows=8, prefill_blocks=0, kv_tokens=n, seconds=0.1 + n * 1e-4) for n in (0, 1000))
    times = StepTimes(device="", jax_version="", model="", config_digest="", block_q=16, steps=steps)
    assert times.estimate(8, 0, 1000) == pytest.approx(0.2)  # and what it read once does not stick

    def run(seconds: float) -> RealRun:
        return RealRun(steps=10, seconds=seconds, output_tokens=1, table_seconds=2.0, idle_seconds=0.0)

    slower, faster = calibrated(times, run(2.5)), calibrated(times, run(1.5))
    assert (slower.estimate(8, 0, 1000), slower.host_seconds) == pytest.approx((0.2, 0.05))
    assert (faster.estimate(8, 0, 1000), faster.host_seconds) == pytest.approx((0.15, 0.0))
