"""Who may queue: limits by requests, tokens and tenant; who is refused or cut because of the time."""

from dataclasses import replace
from typing import Any

import pytest
from test_engine_policies import STEP_S, Server
from tiny_engine import tokens_of

from jaxserve.config import EngineConfig
from jaxserve.config_file import read_config
from jaxserve.errors import ConfigError, DeadlineError, InvalidRequestError, QueueFullError, TenantLimitError
from jaxserve.request import SamplingParams
from jaxserve.scheduling.admission import TIDY_AT, Deadlines
from jaxserve.simulation.step_times import StepTime, StepTimes


def test_the_queue_takes_what_slots_and_limit_hold_and_refuses_the_next() -> None:
    server = Server(max_queued_requests=3)
    for _ in range(4 + 3):
        server.add([3], max_tokens=20)
    with pytest.raises(QueueFullError, match=r"limit of 3 .*max_queued_requests"):
        server.engine.add("one more", [3], SamplingParams(max_tokens=1))
    server.drain()
    server.add([3])
    server.drain()


def test_queued_tokens_are_limited_but_a_long_prompt_alone_is_served() -> None:
    server = Server(max_queued_tokens=50, num_pages=60)
    server.add([4] * 60)
    for _ in range(4):
        server.add([3])
    with pytest.raises(QueueFullError, match="max_queued_tokens"):
        server.engine.add("one more", [3] * 10, SamplingParams(max_tokens=1))
    server.drain()


def test_a_tenant_fills_only_its_own_share_of_the_queue() -> None:
    server = Server(max_queued_per_tenant=2)
    for _ in range(2):
        server.add([3], tenant="a")
    with pytest.raises(TenantLimitError, match="tenant 'a'"):
        server.engine.add("one more", [3], SamplingParams(tenant="a"))
    server.add([3], tenant="b")
    server.drain()


def test_a_tenant_runs_no_more_than_its_limit_and_others_pass_by() -> None:
    server = Server(max_running_per_tenant=1)
    for _ in range(3):
        server.add([3], tenant="a", max_tokens=20, ignore_eos=True)
    other = server.add([3], tenant="b", max_tokens=2)
    server.step()
    assert server.engine.stats().num_running == 2
    server.drain()
    assert next(iter(server.outputs)) in ("0", other)
    assert [name for name in server.outputs if name != other] == ["0", "1", "2"]
    server.check_outputs()


def test_a_deadline_cuts_a_running_request_with_what_it_has() -> None:
    server = Server()
    name = server.add([3], max_tokens=100, ignore_eos=True, deadline_ms=int(1000 * 20 * STEP_S))
    server.drain()
    assert server.outputs[name][-1].finish_reason == "deadline"
    assert 15 <= len(tokens_of(server.outputs[name])) <= 20


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    deadlines = Deadlines()
    server = Server()
    for _ in range(1000):
        name = server.add([3], max_tokens=1)
        request = server.engine._requests[name]
        deadlines.add(replace(request, params=SamplingParams(deadline_ms=86_400_000), finish_reason="stop"))
        server.engine.abort(name)
    assert len(deadlines) <= TIDY_AT
    server.drain()


def test_a_queue_timeout_ends_who_still_waits_and_nobody_who_runs() -> None:
    server = Server()
    running = [server.add([3], max_tokens=50, ignore_eos=True, queue_timeout_ms=50) for _ in range(4)]
    waiting = server.add([3], max_tokens=50, queue_timeout_ms=50)
    server.drain()
    assert [server.outputs[name][-1].finish_reason for name in running] == ["length"] * 4
    assert server.outputs[waiting][-1].finish_reason == "deadline"
    assert tokens_of(server.outputs[waiting]) == []


def test_a_deadline_that_the_queue_makes_impossible_is_refused_at_once() -> None:
    times = StepTimes(
        device="d",
        jax_version="0",
        model="m",
        config_digest="",
        block_q=16,
        steps=tuple(
            StepTime(decode_rows=rows, prefill_blocks=blocks, kv_tokens=keys, seconds=0.1)
            for rows, blocks in [(4, 0), (4, 1), (4, 2)]
            for keys in (0, 1000)
        ),
    )
    server = Server(num_pages=60, step_times=times)
    server.add([4] * 32, deadline_ms=150)  # two blocks, one step
    for _ in range(9):
        server.add([5] * 32)
    with pytest.raises(DeadlineError, match=r"deadline_ms is 500, but the first token is expected after 1100 ms"):
        server.engine.add("late", [6] * 32, SamplingParams(deadline_ms=500))
    server.add([6] * 32, deadline_ms=2000)
    server.drain()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("scheduler.policy=lottery", "scheduler.policy is 'lottery'"),
        ("scheduler.tenant_weights={a: -1}", "scheduler.tenant_weights is -1"),
        ("scheduler.tenant_weights={a: 0}", "scheduler.tenant_weights is 0"),
        ("scheduler.ageing_s=0", "scheduler.ageing_s is 0"),
        ("scheduler.max_queue_delay_ms=-1", "scheduler.max_queue_delay_ms is -1"),
        ("scheduler.max_queued_requests=0", "scheduler.max_queued_requests is 0"),
        ("scheduler.admission=hopeful", "scheduler.admission is 'hopeful'"),
        ("cache.prefix_caching=7", "cache.prefix_caching is 7"),
    ],
)
def test_a_wrong_setting_is_named(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(EngineConfig, assignments=[assignment])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"tenant": "x" * 257}, "tenant"),
        ({"cache_salt": "x" * 2**20}, "cache_salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": -5}, "deadline_ms"),
        ({"queue_timeout_ms": 86_400_001}, "queue_timeout_ms"),
    ],
)
def test_a_wrong_request_is_refused_naming_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
