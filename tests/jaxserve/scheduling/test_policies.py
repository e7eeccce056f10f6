"""Who is named next by each policy, that nobody starves, and that the queue's length costs a decision nothing."""

import sys
from collections import Counter
from typing import Any

import pytest

from jaxserve.clock import MachineClock
from jaxserve.config import CacheSection, EngineConfig, ExecutionSection, SchedulerSection
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import Request
from jaxserve.scheduling.policies import MAX_IDLE_TENANTS, MAX_OVERTAKEN, Fair, Fcfs, LongestPrefix, Priority
from jaxserve.scheduling.reservation import LEAST_SHARE, Reservation
from jaxserve.scheduling.setup import build_scheduler


class Line:
    """Requests that come one a second, and are admitted one by one."""

    def __init__(self, policy: Fcfs) -> None:
        self.policy = policy
        self.now = 0.0
        self.count = 0

    def add(self, prompt_len: int = 1, **params: Any) -> Request:
        request = Request(
            request_id=str(self.count),
            token_ids=[1] * prompt_len,
            prompt_len=prompt_len,
            params=SamplingParams(**params),
            seed=0,
            max_length=100,
            end_token_ids=frozenset(),
            constraints=None,
            arrival=self.count,
            arrival_time=self.now,
        )
        self.count += 1
        self.now += 1.0
        self.policy.add(request)
        return request

    def admit(self) -> Request | None:
        self.policy.begin_step(self.now, 0)
        request = self.policy.candidate()
        if request is not None:
            self.policy.on_admitted(request)
        return request

    def admit_all(self) -> list[Request]:
        order = []
        while (request := self.admit()) is not None:
            order.append(request)
        return order


def test_fcfs_serves_in_order_and_a_preempted_request_keeps_its_place() -> None:
    line = Line(Fcfs())
    requests = [line.add() for _ in range(4)]
    assert line.admit() is requests[0]
    assert line.admit() is requests[1]
    line.policy.add(requests[0])
    line.policy.remove(requests[2])
    assert list(line.policy) == [requests[0], requests[3]]
    assert line.admit_all() == [requests[0], requests[3]]
    assert len(line.policy) == 0


def test_requests_that_were_aborted_in_the_queue_are_forgotten() -> None:
    policy = Priority(ageing_s=1000.0)
    line = Line(policy)
    kept = line.add(priority=-1)
    for _ in range(1000):
        policy.remove(line.add(priority=100))
    assert len(policy._heap) < 100
    assert line.admit_all() == [kept]


def test_lower_priorities_come_first_and_equal_ones_in_order() -> None:
    line = Line(Priority(ageing_s=1000.0))
    requests = [line.add(priority=priority) for priority in (1, 0, 5, 0, -3)]
    assert line.admit_all() == [requests[i] for i in (4, 1, 3, 0, 2)]


def test_a_request_of_low_priority_is_served_although_better_ones_never_stop_coming() -> None:
    line = Line(Priority(ageing_s=10.0))
    patient = line.add(priority=3)
    waited = 0
    while line.admit() is not patient:
        line.add(priority=0)
        line.add(priority=0)
        waited += 1
        assert waited <= 30, "thirty seconds of waiting make up for three steps of priority"


def test_the_longest_cached_prefix_comes_first() -> None:
    cached = {"0": 1, "1": 3, "2": 3, "3": 0}
    line = Line(LongestPrefix(lambda request: cached[request.request_id]))
    requests = [line.add() for _ in range(4)]
    assert line.admit_all() == [requests[i] for i in (1, 2, 0, 3)]


def test_a_request_without_cached_prefix_is_overtaken_only_so_often() -> None:
    line = Line(LongestPrefix(lambda request: int(request.request_id != "0")))
    unlucky = line.add()
    overtaken = 0
    line.add()
    while line.admit() is not unlucky:
        line.add()
        overtaken += 1
    assert overtaken == MAX_OVERTAKEN


def test_a_greedy_tenant_gets_no_more_than_the_others() -> None:
    line = Line(Fair({}))
    for _ in range(100):
        line.add(10, tenant="greedy")
    modest = [line.add(10, tenant="modest") for _ in range(5)]
    order = line.admit_all()
    assert max(order.index(request) for request in modest) <= 10


def test_twice_the_weight_is_twice_the_tokens() -> None:
    line = Line(Fair({"paying": 2.0}))
    for _ in range(60):
        line.add(10, tenant="paying")
        line.add(10, tenant="free")
    served = Counter(request.params.tenant for request in line.admit_all()[:60])
    assert served == {"paying": 40, "free": 20}


def test_output_tokens_are_charged_too() -> None:
    line = Line(Fair({}))
    chatty = line.add(10, tenant="chatty")
    line.add(10, tenant="chatty")
    line.add(40, tenant="reader")
    assert line.admit() is chatty
    for _ in range(20):
        line.policy.on_output_tokens([chatty])
    assert [request.params.tenant for request in line.admit_all()] == ["reader", "chatty"]


def test_a_tenant_that_was_away_saves_nothing_up() -> None:
    line = Line(Fair({}))
    for _ in range(50):
        line.add(10, tenant="busy")
    for _ in range(40):
        line.admit()
    for _ in range(50):
        line.add(10, tenant="back")
    served = Counter(request.params.tenant for request in line.admit_all()[:20])
    assert abs(served["busy"] - served["back"]) <= 2


def test_tenants_that_left_are_forgotten() -> None:
    policy = Fair({})
    line = Line(policy)
    for number in range(5 * MAX_IDLE_TENANTS):
        line.add(1, tenant=str(number))
        line.admit()
    assert len(policy._counters) < 3 * MAX_IDLE_TENANTS


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest-prefix", "fair"])
def test_a_decision_costs_the_same_however_many_wait(policy: str) -> None:
    def calls(num_waiting: int) -> int:
        config = EngineConfig(
            cache=CacheSection(page_size=16, num_pages=400, dtype="float32"),
            scheduler=SchedulerSection.model_validate(
                {"max_num_seqs": 32, "max_num_batched_tokens": 32 + 128, "policy": policy}
            ),
            execution=ExecutionSection(block_q=16, prefill_buckets=(8,), decode_buckets=(32,)),
        )
        scheduler = build_scheduler(config, MachineClock())
        for number in range(num_waiting):
            scheduler.add(
                Request(
                    request_id=str(number),
                    token_ids=[number, 1, 2],
                    prompt_len=3,
                    params=SamplingParams(tenant=str(number % 7)),
                    seed=0,
                    max_length=12,
                    end_token_ids=frozenset(),
                    constraints=None,
                )
            )
        count = 0

        def tick(*_: Any) -> None:
            nonlocal count
            count += 1

        sys.setprofile(tick)
        try:
            for _ in range(40):
                plan = scheduler.schedule()
                if plan is not None:
                    reasons = scheduler.append(plan.samples, [5] * len(plan.samples))
                    for request, reason in zip(plan.samples, reasons, strict=True):
                        if reason is not None:
                            scheduler.finish(request, reason)
        finally:
            sys.setprofile(None)
        return count

    assert calls(5000) < 1.5 * calls(300)


def test_what_is_kept_back_grows_with_each_preemption_and_shrinks_without() -> None:
    reservation = Reservation("optimistic")
    room = {"pages_now": 10, "pages_later": 100, "num_running": 2}
    assert reservation.fits(**room, available=20)
    for _ in range(10):
        reservation.on_preemption()
    assert reservation.share == 1.0
    assert not reservation.fits(**room, available=109)
    assert reservation.fits(**room, available=110)
    for _ in range(1000):
        reservation.on_step()
    assert reservation.share == LEAST_SHARE


def test_guaranteed_keeps_everything_back_always() -> None:
    reservation = Reservation("guaranteed")
    for _ in range(1000):
        reservation.on_step()
    assert not reservation.fits(pages_now=10, pages_later=100, num_running=1, available=109)
    assert reservation.fits(pages_now=10, pages_later=100, num_running=1, available=110)
