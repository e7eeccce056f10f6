"""What runs next: claims about single decisions, and properties of whole runs, without a device."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.constraints import TokenConstraints
from jaxserve.device.buckets import choose_shape, step_shapes
from jaxserve.request import SamplingParams
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import Plan, Request
from jaxserve.scheduling.policies import Fcfs
from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.reservation import Reservation
from jaxserve.scheduling.scheduler import Scheduler

PAGE_SIZE = 4
BLOCK_Q = 8
TOKEN = 1


class Host:
    """A scheduler, and what the engine does around it: one step stays in flight, tokens are read a step later."""

    def __init__(self, *, num_pages: int = 100, **options: int) -> None:
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 4 + 2 * BLOCK_Q, "max_prefill_blocks": 2}
        self.options = defaults | options
        # All prompts are of one token: with a cache they would share every page.
        cache = PrefixCache(PagePool(num_pages + 1), page_size=PAGE_SIZE, is_enabled=False)
        self.scheduler = Scheduler(
            cache, Fcfs(), Reservation("optimistic"), page_size=PAGE_SIZE, block_q=BLOCK_Q, **self.options
        )
        self.in_flight: deque[Plan] = deque()
        self.arrived: list[Request] = []

    def add(self, prompt_len: int, output_len: int = 10, params: SamplingParams | None = None) -> Request:
        params = params or SamplingParams()
        request = Request(
            request_id=str(len(self.arrived)),
            token_ids=[TOKEN] * prompt_len,
            prompt_len=prompt_len,
            params=params,
            seed=0,
            max_length=prompt_len + output_len,
            end_token_ids=frozenset(),
            constraints=TokenConstraints.of(params, frozenset(), 10, 10),
        )
        self.arrived.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> Plan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.in_flight.append(plan)
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            self.read(self.in_flight.popleft())
        self.scheduler.check_integrity()
        return plan

    def steps(self, count: int) -> list[Plan]:
        plans = [self.step() for _ in range(count)]
        return [plan for plan in plans if plan is not None]

    def until_preemption(self) -> Plan:
        """Steps until one preempts, and returns it."""
        for _ in range(100):
            plan = self.step()
            if self.scheduler.num_preemptions:
                assert plan is not None
                return plan
        raise AssertionError("nothing was preempted")

    def read(self, plan: Plan) -> None:
        reasons = self.scheduler.append(plan.samples, [TOKEN] * len(plan.samples))
        for request, reason in zip(plan.samples, reasons, strict=True):
            if reason is not None:
                self.scheduler.finish(request, reason)


def chunks_of(plan: Plan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(chunk.request.request_id, chunk.start, chunk.count) for chunk in plan.chunks]


def decodes_of(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [request.request_id for request in plan.decodes]


def blocks_of(plan: Plan) -> int:
    return sum(-(-chunk.count // BLOCK_Q) for chunk in plan.chunks)


def test_nothing_to_do_is_no_step() -> None:
    assert Host().step() is None


def test_running_requests_decode_while_a_long_prompt_comes_in() -> None:
    host = Host()
    first = host.add(3)
    host.steps(2)
    host.add(40)
    for _ in range(3):
        plan = host.step()
        assert plan is not None
        assert plan.decodes == (first,)
        assert plan.chunks


def test_a_long_prompt_runs_in_chunks_of_whole_blocks_and_samples_with_its_last() -> None:
    host = Host()
    host.add(37)
    plans = host.steps(3)
    assert [chunks_of(plan) for plan in plans] == [[("0", 0, 16)], [("0", 16, 16)], [("0", 32, 5)]]
    assert [len(plan.samples) for plan in plans] == [0, 0, 1]
    assert plans[2].positions == (37,)


def test_several_prompts_share_a_step() -> None:
    host = Host()
    host.add(5)
    host.add(8)
    host.add(1)
    assert chunks_of(host.step()) == [("0", 0, 5), ("1", 0, 8)]
    assert chunks_of(host.step()) == [("2", 0, 1)]


def test_what_is_left_of_a_step_goes_to_the_head_of_the_next_prompt() -> None:
    host = Host(max_num_batched_tokens=4 + 3 * BLOCK_Q, max_prefill_blocks=3)
    host.add(9)
    host.add(20)
    assert chunks_of(host.step()) == [("0", 0, 9), ("1", 0, 8)]
    assert chunks_of(host.step()) == [("1", 8, 12)]


def test_decodes_leave_less_of_the_budget_for_prompts() -> None:
    host = Host(max_num_batched_tokens=1 + 2 * BLOCK_Q)
    host.add(2)
    host.add(2)
    host.steps(2)
    host.add(16)
    plan = host.step()
    assert plan is not None
    assert len(plan.decodes) == 2
    assert chunks_of(plan) == [("2", 0, 8)]


def test_a_short_request_does_not_overtake_a_long_one_that_waits_for_pages() -> None:
    host = Host(num_pages=6)
    host.add(16, output_len=4)
    host.steps(2)
    host.add(12)
    host.add(1)
    assert host.step() is not None
    assert [request.request_id for request in host.scheduler.waiting] == ["1", "2"]


def test_no_more_requests_run_than_there_are_slots() -> None:
    host = Host(max_num_seqs=2)
    for _ in range(4):
        host.add(1, output_len=3)
    host.steps(2)
    assert [request.request_id for request in host.scheduler.running] == ["0", "1"]
    host.steps(8)
    assert [request.finish_reason for request in host.arrived] == ["length"] * 4


def test_a_token_is_computed_before_the_host_has_read_it() -> None:
    host = Host()
    request = host.add(3, output_len=3)
    plans = host.steps(3)
    assert [plan.positions for plan in plans] == [(3,), (4,), (5,)]
    assert request.num_in_flight == 1
    assert len(request.token_ids) == 5


def test_nothing_is_computed_past_the_last_token() -> None:
    host = Host()
    host.add(3, output_len=2)
    assert len(host.steps(10)) == 2
    assert host.scheduler.pool.num_free == 100


def test_a_request_whose_next_mask_needs_its_last_token_waits_for_it() -> None:
    host = Host()
    host.add(3, params=SamplingParams(bad_word_ids=((4, 5),)))
    host.add(3)
    plans = host.steps(6)
    assert [decodes_of(plan) for plan in plans[1:]] == [["1"], ["0", "1"], ["1"], ["0", "1"], ["1"]]


def test_pages_come_as_tokens_need_them() -> None:
    host = Host()
    request = host.add(3)
    host.step()
    assert len(request.pages) == 1
    host.step()  # position 3, the page's last
    assert len(request.pages) == 1
    host.step()
    assert len(request.pages) == 2


def test_the_newest_request_gives_up_its_pages_and_is_next_in_line() -> None:
    host = Host(num_pages=4)
    old, new = host.add(4, output_len=12), host.add(4, output_len=12)
    host.step()
    waiting = host.add(4)
    host.until_preemption()
    assert host.scheduler.running == [old]
    assert list(host.scheduler.waiting) == [new, waiting]
    assert not new.pages
    assert new.slot < 0


def test_a_preempted_request_recomputes_prompt_and_output_and_goes_on_at_its_position() -> None:
    host = Host(num_pages=4)
    old, new = host.add(4, output_len=12), host.add(4, output_len=12)
    host.until_preemption()
    host.step()
    known = len(new.token_ids)
    assert known > 4
    assert new.num_in_flight == 0
    first_residence = new.residence
    plan = next(plan for plan in (host.step() for _ in range(100)) if new.slot >= 0)
    assert plan is not None
    assert old.finish_reason == "length"
    assert chunks_of(plan) == [("1", 0, known)]
    assert plan.positions[0] == known
    assert new.residence != first_residence


def test_a_step_that_preempts_admits_nobody() -> None:
    host = Host(num_pages=4)
    host.add(4, output_len=12)
    host.add(4, output_len=12)
    assert chunks_of(host.until_preemption()) == []


def test_a_request_may_preempt_itself_when_it_is_the_newest() -> None:
    host = Host(num_pages=4)
    old, new = host.add(8, output_len=8), host.add(1, output_len=12)
    host.until_preemption()
    assert host.scheduler.running == [old]
    assert list(host.scheduler.waiting) == [new]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_request_can_be_ended_at_any_time_and_leaves_nothing_behind(steps: int) -> None:
    host = Host()
    request = host.add(20)
    host.steps(steps)
    host.scheduler.finish(request, "abort")
    assert host.scheduler.pool.num_free == 100
    host.steps(3)
    assert not host.scheduler.running
    assert not host.scheduler.queued()


def test_ending_a_request_twice_is_our_own_error() -> None:
    host = Host()
    request = host.add(3)
    host.scheduler.finish(request, "abort")
    with pytest.raises(AssertionError):
        host.scheduler.finish(request, "abort")


def test_the_integrity_check_finds_a_page_that_no_request_holds() -> None:
    host = Host()
    host.add(3)
    host.step()
    host.scheduler.running[0].pages.pop()
    with pytest.raises(AssertionError, match="page 1 counts 1 holders"):
        host.scheduler.check_integrity()


def check_plan(host: Host, plan: Plan, computed: dict[int, int]) -> None:
    """What every plan must satisfy. `computed`: tokens per residence, as the plans so far add up."""
    options = host.options
    blocks = blocks_of(plan)
    assert len(plan.decodes) + blocks * BLOCK_Q <= options["max_num_batched_tokens"]
    shapes = step_shapes((1, options["max_num_seqs"]), (1, options["max_prefill_blocks"]))
    choose_shape(shapes, len(plan.decodes), blocks)  # raises if none holds the plan
    work = [(request, computed.get(request.residence, 0), 1) for request in plan.decodes]
    work += [(chunk.request, chunk.start, chunk.count) for chunk in plan.chunks]
    assert len({request.request_id for request, _, _ in work}) == len(work), "a request twice in one step"
    for request, start, count in work:
        assert start == computed.get(request.residence, 0), "a gap or an overlap"
        computed[request.residence] = start + count
        assert request.num_computed == start + count
        assert len(request.pages) * PAGE_SIZE >= start + count, "a token without a page"
    assert plan.samples == (*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.is_last))
    for request, position in zip(plan.samples, plan.positions, strict=True):
        assert position == computed[request.residence], "a sample of a token that has no hidden state"
        assert position == request.length - 1, "not the place of the token that is sampled"
        assert position < request.max_length


def must_decode(host: Host) -> list[Request]:
    return [
        request
        for request in host.scheduler.running
        if not request.is_prefilling
        and request.length < request.max_length
        and not (request.num_in_flight and request.constraints)
    ]


arrival = st.tuples(
    st.just(0) | st.integers(0, 6),  # steps since the one before
    st.integers(1, 30) | st.integers(40, 60),  # prompt tokens
    st.integers(1, 20),  # output tokens
    st.booleans(),  # has a bad word of several tokens
)


@settings(max_examples=300)
@given(
    workload=st.lists(arrival, min_size=4, max_size=16),
    num_pages=st.integers(20, 26),  # the longest request, 80 tokens, needs 20
    max_num_seqs=st.integers(1, 5),
    spare=st.integers(BLOCK_Q, 4 * BLOCK_Q),
    aborts=st.dictionaries(st.integers(0, 60), st.integers(0, 15), max_size=4),
    data=st.data(),
)
def test_whatever_comes_in_is_served_in_order_within_its_limits(
    workload: list[tuple[int, int, int, bool]],
    num_pages: int,
    max_num_seqs: int,
    spare: int,
    aborts: dict[int, int],
    data: st.DataObject,
) -> None:
    host = Host(
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare,
        max_prefill_blocks=data.draw(st.integers(1, 5)),
    )
    arrivals = deque(workload)
    computed: dict[int, int] = {}
    pause = 0
    total_tokens = sum(prompt + output for _, prompt, output, _ in workload)
    for number in range(20 * total_tokens + 100):
        while arrivals and pause >= arrivals[0][0]:
            pause = 0
            _, prompt_len, output_len, has_bad_word = arrivals.popleft()
            words: dict[str, Any] = {"bad_word_ids": ((4, 5),)} if has_bad_word else {}
            host.add(prompt_len, output_len, SamplingParams(**words))
        pause += 1
        victim = aborts.get(number)
        if victim is not None and victim < len(host.arrived) and host.arrived[victim].finish_reason is None:
            host.scheduler.finish(host.arrived[victim], "abort")
        due = must_decode(host)
        preemptions = host.scheduler.num_preemptions
        plan = host.scheduler.schedule()
        if plan is not None:
            check_plan(host, plan, computed)
        scheduled = [] if plan is None else list(plan.decodes)
        if host.scheduler.num_preemptions == preemptions:
            assert scheduled == due, "decodes come first, all of them, oldest first"
        else:
            assert scheduled == due[: len(scheduled)], "only the newest may lose their turn"
        in_line = [int(request.request_id) for request in (*host.scheduler.running, *host.scheduler.waiting)]
        assert in_line == sorted(in_line), "first come, first served"
        if plan is not None:
            host.in_flight.append(plan)
        if host.in_flight and (plan is None or len(host.in_flight) > 1):
            host.read(host.in_flight.popleft())
        host.scheduler.check_integrity()
        if not arrivals and not host.in_flight and not in_line:
            break
    else:
        raise AssertionError("a request starves")
    assert host.scheduler.pool.num_free == num_pages
    for request in host.arrived:
        assert request.finish_reason == "abort" or len(request.token_ids) == request.max_length
