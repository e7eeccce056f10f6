"""Random traffic under every policy on a shadow device: pages add up, nobody starves, nothing is shared wrongly."""

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow_device import ShadowDevice, expected_tokens
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, collect, tiny_config, tokens_of

from jaxserve.clock import VirtualClock
from jaxserve.config import EngineConfig, PolicyName
from jaxserve.engine import Engine
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.scheduling.setup import cache_root
from jaxserve.simulation.step_times import StepTimes

POLICIES = get_args(PolicyName)
STEP_S = 0.01
# Prompts that begin alike, and go on alike or not.
STEM = [7, 7, 8, 9, 10, 11, 12, 13] * 4


class Server:
    """An engine on a shadow device and a virtual clock."""

    def __init__(
        self,
        *,
        num_pages: int = 24,
        cache: dict[str, Any] | None = None,
        step_times: StepTimes | None = None,
        **scheduler: Any,
    ) -> None:
        options = TinyOptions(
            num_pages=1 + num_pages,
            max_num_seqs=4,
            max_num_batched_tokens=4 + 2 * 16,
            block_q=16,
            decode_buckets=(4,),
            prefill_buckets=(1, 2),
        )
        config: EngineConfig = tiny_config(options)
        config = config.model_copy(
            update={
                "scheduler": config.scheduler.model_copy(update=scheduler),
                "cache": config.cache.model_copy(update=cache or {}),
            }
        )
        self.clock = VirtualClock()
        self.device = ShadowDevice(options.page_size, options.block_q)
        self.engine = Engine(
            config,
            TINY_MODEL,
            self.device,
            num_token_ids=NUM_TOKEN_IDS,
            eos_token_ids=frozenset({EOS}),
            clock=self.clock,
            step_times=step_times,
        )
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.added: dict[str, tuple[list[int], SamplingParams]] = {}

    def add(self, prompt: list[int], **params: Any) -> str:
        name = str(len(self.added))
        self.added[name] = (prompt, SamplingParams(**({"seed": 1, "max_tokens": 8} | params)))
        self.engine.add(name, *self.added[name])
        return name

    def step(self) -> None:
        self.clock.wait_until(self.clock.now() + STEP_S)
        collect(self.outputs, self.engine.step())
        self.engine.check_integrity()

    def drain(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("a request starves")

    def check_outputs(self, *, aborted: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        for name, (prompt, params) in self.added.items():
            expected = expected_tokens(
                cache_root(self.engine.config, params), prompt, params, frozenset({EOS, *params.stop_token_ids})
            )
            tokens = tokens_of(self.outputs[name])
            reasons = [output.finish_reason for output in self.outputs[name]]
            assert all(reason is None for reason in reasons[:-1])
            if name in aborted and reasons[-1] == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected, f"request {name} got other tokens"
                assert reasons[-1] == ("stop" if expected[-1] == EOS else "length")


request = st.fixed_dictionaries(
    {
        "prompt": st.tuples(st.integers(0, len(STEM)), st.lists(st.integers(3, 5), min_size=1, max_size=20)).map(
            lambda parts: STEM[: parts[0]] + parts[1]
        ),
        "max_tokens": st.integers(1, 30),
        "seed": st.integers(0, 2),
        "tenant": st.sampled_from(["", "a", "b"]),
        "priority": st.integers(-2, 2),
        "cache_salt": st.sampled_from([None, None, "s", "t"]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    }
)


@settings(max_examples=150)
@given(
    policy=st.sampled_from(POLICIES),
    admission=st.sampled_from(["optimistic", "guaranteed"]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    isolate_tenants=st.booleans(),
    num_pages=st.integers(11, 30),  # the longest request, 82 tokens, needs 11
    host_pages=st.sampled_from([0, 1, 2, 5, 20, 100]),
    threshold=st.sampled_from([None, 16]),
    consecutive=st.sampled_from([None, 1, 2]),
    per_tenant=st.sampled_from([None, None, 1, 2]),
    arrivals=st.lists(st.tuples(st.integers(0, 5), request), min_size=3, max_size=14),
    aborts=st.dictionaries(st.integers(0, 40), st.integers(0, 13), max_size=3),
    flushes=st.sets(st.integers(0, 60), max_size=2),
)
def test_whatever_the_policy_everybody_is_served_as_if_alone(
    policy: str,
    admission: str,
    prefix_caching: bool,
    isolate_tenants: bool,
    num_pages: int,
    host_pages: int,
    threshold: int | None,
    consecutive: int | None,
    per_tenant: int | None,
    arrivals: list[tuple[int, dict[str, Any]]],
    aborts: dict[int, int],
    flushes: set[int],
) -> None:
    server = Server(
        num_pages=num_pages,
        cache={"prefix_caching": prefix_caching, "isolate_tenants": isolate_tenants, "host_pages": host_pages},
        policy=policy,
        admission=admission,
        long_prefill_token_threshold=threshold,
        max_consecutive_prefills=consecutive,
        max_running_per_tenant=per_tenant,
        tenant_weights={"a": 3.0},
    )
    number = 0
    aborted: set[str] = set()
    for pause, arrival in arrivals:
        for _ in range(pause):
            server.step()
            number += 1
            if number in flushes:
                server.engine.flush_cache()
            if str(aborts.get(number)) in server.added:
                aborted.add(str(aborts[number]))
                server.engine.abort(str(aborts[number]))
        server.add(**arrival)
    server.drain(3000)
    server.check_outputs(aborted=aborted)
    stats = server.engine.stats()
    assert stats.pages_active == 0
    assert stats.num_running == stats.num_waiting == stats.waiting_tokens == 0
    assert prefix_caching or stats.prefix_cache_hits_total == stats.pages_cached == 0
    assert admission == "optimistic" or stats.preemptions_total == 0, "guaranteed means never preempted"


def test_a_conversation_finds_its_own_answer_in_the_cache() -> None:
    server = Server()
    first = server.add(STEM[:20], max_tokens=12)
    server.drain()
    answer = tokens_of(server.outputs[first])
    computed = server.device.num_computed
    second = server.add([*STEM[:20], *answer, 5, 6], max_tokens=2)
    server.drain()
    server.check_outputs()
    # 34 tokens; of the 31 that the first turn has computed, three full pages of 8.
    assert server.outputs[second][0].num_cached_tokens == 24
    assert server.device.num_computed - computed == 34 - 24 + 1


def test_a_prompt_that_follows_in_the_same_step_shares_what_is_computed_in_it() -> None:
    server = Server()
    server.add([*STEM[:8], 3], max_tokens=2)
    second = server.add([*STEM[:8], 4], max_tokens=2)
    server.engine.step()
    assert server.engine.stats().num_running == 2
    assert server.engine.stats().pages_shared == 1
    server.drain()
    server.check_outputs()
    assert server.outputs[second][0].num_cached_tokens == 8


def test_prompts_that_wait_for_their_share_of_the_budget_skip_what_others_compute_meanwhile() -> None:
    server = Server(long_prefill_token_threshold=16)
    prompts = [[*(STEM * 2), token] for token in (3, 4)]
    for prompt in prompts:
        server.add(prompt, max_tokens=1)
    server.drain()
    server.check_outputs()
    assert server.device.num_computed < 65 + 40


def test_prompt_logprobs_compute_every_token_and_still_feed_the_cache() -> None:
    server = Server()
    server.add(STEM, max_tokens=1)
    server.drain()
    scored = server.add(STEM, max_tokens=1, prompt_logprobs=0)
    server.drain()
    assert server.outputs[scored][0].num_cached_tokens == 0
    assert server.outputs[scored][0].prompt_logprobs is not None
    assert len(server.outputs[scored][0].prompt_logprobs) == len(STEM)


@pytest.mark.parametrize(
    ("cache", "params", "shares"),
    [
        ({}, {"cache_salt": "mine"}, False),
        ({}, {"tenant": "other"}, True),
        ({"isolate_tenants": True}, {"tenant": "other"}, False),
        ({}, {}, True),
    ],
)
def test_salts_and_isolated_tenants_never_share(cache: dict[str, Any], params: dict[str, Any], shares: bool) -> None:
    server = Server(cache=cache)
    server.add(STEM)
    server.drain()
    second = server.add(STEM, **params)
    server.drain()
    server.check_outputs()
    assert (server.outputs[second][0].num_cached_tokens > 0) == shares


def test_a_flush_while_serving_changes_no_output() -> None:
    server = Server()
    server.add([*STEM, 3], max_tokens=20)
    server.step()
    server.step()
    assert server.engine.flush_cache() > 0
    late = server.add([*STEM, 3], max_tokens=20)
    server.drain()
    server.check_outputs()
    assert server.outputs[late][0].num_cached_tokens == 0


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_batch_runs_until_its_longest_ends(policy: str) -> None:
    server = Server(policy=policy, max_queue_delay_ms=50.0, num_pages=60)
    for tokens in (2, 3, 4, 15):
        server.add([3], max_tokens=tokens, ignore_eos=True)
    late = server.add([3], max_tokens=1)
    while late not in server.outputs:
        server.step()
    assert server.outputs["3"][-1].finish_reason == "length"
    server.drain()


def test_a_dynamic_batch_begins_when_it_is_full_or_its_first_has_waited_long_enough() -> None:
    server = Server(policy="dynamic", max_queue_delay_ms=100.0)
    server.add([3], max_tokens=1)
    began = server.clock.now()
    server.drain()
    assert 0.1 <= server.clock.now() - began < 0.15
    for _ in range(4):
        server.add([3], max_tokens=1)
    began = server.clock.now()
    server.drain()
    assert server.clock.now() - began < 0.05


def test_optimistic_admission_learns_and_stops_preempting() -> None:
    """Outputs all run to their limit, so every bet is lost at first."""
    server = Server(num_pages=24)
    for number in range(40):
        server.add([3 + number, 4], max_tokens=90, ignore_eos=True)
    server.drain()
    preemptions = server.engine.stats().preemptions_total
    assert 0 < preemptions <= 40, "each request is preempted once at most, on average"
