"""Metrics that add up: every accepted sequence ends once, whatever ends it, and every name in configs/ exists."""

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import yaml
from fake_engine import BAD_TOKEN, FakeEngine
from live_server import LiveServer, serving

from jaxserve.request import FinishReason
from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerSection
from server.engine.async_engine import AsyncEngine
from server.observability.metrics import Metrics

MONITORING = Path(__file__).parents[3] / "configs/monitoring"
FOREVER = 10**9
TIMEOUT_S = 30.0


@contextmanager
def served(tokenizer: Tokenizer, fake: FakeEngine, **observability: Any) -> Iterator[LiveServer]:
    section = ServerSection.model_validate({"observability": observability})
    with serving(
        lambda engine: create_app(engine, tokenizer, section), lambda: AsyncEngine(lambda _: fake), settings=section
    ) as live:
        live.wait_until_ready()
        yield live


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def ends(live: LiveServer) -> dict[str, float]:
    return {reason: live.metric("request_success_total", finished_reason=reason) for reason in get_args(FinishReason)}


def test_every_accepted_sequence_ends_exactly_once_whatever_ends_it(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=2 * FOREVER, step_s=0.001)
    word = tokenizer.encode(" two")[0]
    with served(tokenizer, fake) as live:

        def post(fields: dict[str, Any], timeout_s: float = TIMEOUT_S) -> int:
            body = {"model": "fake", "prompt": [500], "max_tokens": 3, **fields}
            try:
                return httpx.post(live.url + "/v1/completions", json=body, timeout=timeout_s).status_code
            except httpx.TimeoutException:
                return 0

        def leave_stream(n: int) -> int:
            body = {"model": "fake", "prompt": [500], "max_tokens": FOREVER, "n": n, "stream": True}
            with httpx.stream("POST", live.url + "/v1/completions", json=body) as reply:
                next(reply.iter_raw())
            return reply.status_code

        jobs: list[tuple[Callable[[], int], str, int]] = [
            *[(lambda: post({"n": 2}), "length", 2)] * 6,
            *[(lambda: post({"stream": True, "n": 3}), "length", 3)] * 4,
            *[(lambda: post({"prompt": [500, word], "max_tokens": 9, "stop": " two"}), "stop", 1)] * 4,
            *[(lambda: post({"prompt": [BAD_TOKEN]}), "error", 1)] * 4,
            *[(lambda: post({"prompt": [BAD_TOKEN], "stream": True}), "error", 1)] * 4,
            *[(lambda: post({"max_tokens": FOREVER, "n": 2}, 0.4), "abort", 2)] * 3,
            *[(lambda: leave_stream(2), "abort", 2)] * 3,
            *[(lambda: post({"prompt": ""}), "refused", 1)] * 5,
        ]
        random.Random(1).shuffle(jobs)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda job: job[0](), jobs))
        wait_for(lambda: not fake.requests and live.metric("num_requests_running") == 0)
        expected = dict.fromkeys([*get_args(FinishReason), "refused"], 0)
        for _, reason, amount in jobs:
            expected[reason] += amount
        refused = expected.pop("refused")
        wait_for(lambda: ends(live) == expected)
        assert live.metric("requests_accepted_total") == sum(expected.values())
        assert live.metric("requests_refused_total") == refused
        assert live.metric("client_disconnects_total") == expected["abort"]
        assert live.metric("e2e_request_latency_seconds_count") == sum(expected.values())
        firsts = live.metric("time_to_first_token_seconds_count")
        assert expected["length"] + expected["stop"] <= firsts <= sum(expected.values())
        assert live.metric("request_queue_time_seconds_count") == firsts
        assert live.metric("request_queue_time_seconds_sum") == pytest.approx(0.25 * firsts)


def test_a_sequences_tokens_are_timed_once_each(tokenizer: Tokenizer) -> None:
    with served(tokenizer, FakeEngine()) as live:
        body = {"model": "fake", "prompt": [500], "max_tokens": 9, "n": 2}
        assert httpx.post(live.url + "/v1/completions", json=body).status_code == 200
        assert live.metric("time_to_first_token_seconds_count") == 2
        assert live.metric("inter_token_latency_seconds_count") == 2 * 8
        assert live.metric("step_time_seconds_count") == live.metric("detokenizer_lag_seconds_count") >= 9


def test_the_death_of_the_engine_ends_what_was_open_as_errors(tokenizer: Tokenizer) -> None:
    with served(tokenizer, FakeEngine(max_model_len=2 * FOREVER, die_at_step=20)) as live:
        body = {"model": "fake", "prompt": [500], "max_tokens": FOREVER, "n": 3}
        assert httpx.post(live.url + "/v1/completions", json=body).status_code == 500
        assert ends(live)["error"] == live.metric("requests_accepted_total") == 3


def test_vllms_prefix_takes_vllms_names_and_leaves_our_own(tokenizer: Tokenizer) -> None:
    with served(tokenizer, FakeEngine(), metrics_prefix="vllm") as live:
        text = live.get("/metrics").text
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_bucket",
            "e2e_request_latency_seconds_sum",
            "request_queue_time_seconds_count",
            "prompt_tokens_total",
            "generation_tokens_total",
            "num_preemptions_total",
            "request_success_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
        ):
            assert re.search(rf'^vllm:{name}{{.*model_name="fake"', text, re.MULTILINE), name
            assert f"jaxserve:{name}" not in text
        assert "jaxserve:compilations_total" in text
        assert "vllm:compilations" not in text


def known_names(tokenizer: Tokenizer) -> set[str]:
    with served(tokenizer, FakeEngine()) as live:
        return set(re.findall(r"^(jaxserve:\w+)", live.get("/metrics").text, re.MULTILINE))


def named_in(text: str) -> set[str]:
    return set(re.findall(r"jaxserve:\w+", text))


def test_every_metric_that_the_dashboard_and_the_alerts_name_exists(tokenizer: Tokenizer) -> None:
    known = known_names(tokenizer)
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    asked = {name for panel in panels for target in panel["targets"] for name in named_in(target["expr"])}
    assert asked
    assert asked <= known
    for variable in dashboard["templating"]["list"]:
        assert named_in(str(variable["query"])) <= known
    alerts = yaml.safe_load((MONITORING / "prometheus-alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert rule["annotations"]["summary"]
        assert named_in(rule["expr"]) <= known
        assert named_in(rule["expr"]) or "up{" in rule["expr"]


def test_two_apps_in_one_process_do_not_share_counters() -> None:
    first, second = (Metrics(AsyncEngine(lambda _: FakeEngine())) for _ in range(2))
    first.accept(3)
    assert b"requests_accepted_total 3.0" in first.render()
    assert b"requests_accepted_total 0.0" in second.render()
