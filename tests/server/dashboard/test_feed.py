"""The feed over HTTP, without a browser: what it tells, to whom, and that it costs nothing when nobody watches."""

import base64
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import TIMEOUT_S, LiveServer
from watched_server import watched_server

from jaxserve.text.tokenizer import Tokenizer
from server.dashboard.feed import PERIOD_S
from server.dashboard.routes import OPEN_PATHS

KEY = "key-of-the-viewer"
FEED = "/dashboard/feed"


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with watched_server(tokenizer, step_s=0.01) as live:
        yield live


@contextmanager
def watching(live: LiveServer) -> Iterator[Iterator[dict[str, Any]]]:
    with httpx.stream("GET", live.url + FEED, timeout=TIMEOUT_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def ask(live: LiveServer, max_tokens: int, words: str = "Tell me a story. ") -> httpx.Response:
    body = {"model": "watched", "messages": [{"role": "user", "content": words * 20}], "max_tokens": max_tokens}
    return live.post("/v1/chat/completions", body)


@contextmanager
def asked(live: LiveServer, max_tokens: int) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=ask, args=(live, max_tokens))
    thread.start()
    yield thread
    thread.join(TIMEOUT_S)


def until(events: Iterator[dict[str, Any]], condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    for event in events:
        if condition(event):
            return event
        assert time.monotonic() < deadline, event
    raise AssertionError("the feed ended")


def held(event: dict[str, Any]) -> int:
    codes = base64.b64decode(event["picture"]["pages"]["cells"])
    return sum(low >= 2 for low in codes[::2])


def keeps_steps(live: LiveServer) -> bool:
    engine = live.engine._engine
    assert engine is not None
    return engine._history is not None


def test_pages_and_lanes_come_and_go_with_a_request(live: LiveServer) -> None:
    with watching(live) as events:
        before = until(events, lambda event: event["state"] == "ready")
        assert not before["picture"]["running"]
        with asked(live, 60):
            during = until(events, lambda event: bool(event["picture"]["running"]))
            (request,) = during["picture"]["running"]
            assert held(during) == request["pages"] == during["stats"]["pages_active"] > 0
            assert request["name"].startswith("chatcmpl-")
            until(events, lambda event: any(span[2] == 0 for span in event["picture"]["steps"]["spans"]))
        after = until(events, lambda event: not event["picture"]["running"])
        assert held(after) == 0
        assert after["stats"]["pages_cached"] > 0
        assert after["picture"]["tree"]
        assert after["latency"]["first_token"]["count"] == 1
        assert after["latency"]["token_gap"]["p50"] > 0
        spans = after["picture"]["steps"]["spans"]
        prompt = sum(span[5] for span in spans if span[1] == request["number"] and span[2] == 1)
        assert prompt == request["prompt"]


def test_all_viewers_are_sent_the_same_pictures(live: LiveServer) -> None:
    with watching(live) as first, watching(live) as second, asked(live, 80):
        times = [{event["time"] for event, _ in zip(viewer, range(8), strict=False)} for viewer in (first, second)]
        assert len(times[0] & times[1]) >= 4


def test_pictures_come_a_few_times_a_second_at_most(live: LiveServer) -> None:
    with watching(live) as events, asked(live, 150):
        until(events, lambda event: bool(event["picture"]["running"]))
        moments = [event["time"] for event, _ in zip(events, range(6), strict=False)]
    gaps = [late - early for early, late in itertools.pairwise(moments)]
    assert min(gaps) >= PERIOD_S / 2


def test_nobody_watching_costs_nothing(live: LiveServer) -> None:
    with watching(live) as events:
        until(events, lambda event: event["picture"] is not None)
        assert keeps_steps(live)
    deadline = time.monotonic() + TIMEOUT_S
    while keeps_steps(live):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(2 * PERIOD_S)
    before = live.engine.stats
    time.sleep(3 * PERIOD_S)
    assert live.engine.stats is before  # the engine's thread was not woken once


def test_an_idle_engine_is_not_woken_by_those_who_watch(live: LiveServer) -> None:
    with watching(live) as events:
        until(events, lambda event: event["picture"] is not None)
        next(events)
        before = live.engine.stats
        next(events)
        next(events)
        assert live.engine.stats is before


def test_what_users_write_is_not_told(live: LiveServer) -> None:
    secret = "xylophone"
    with watching(live) as events:
        body = {
            "model": "watched",
            "messages": [{"role": "user", "content": secret * 9}],
            "max_tokens": 30,
            "cache_salt": secret,
        }
        thread = threading.Thread(target=live.post, args=("/v1/chat/completions", body))
        thread.start()
        event = until(events, lambda event: bool(event["picture"]["running"]))
        assert secret not in json.dumps(event)
        assert any(line[4] for line in event["picture"]["tree"])  # its tree is known to be private, no more
        thread.join()


def test_the_page_is_whole_and_may_load_nothing_from_elsewhere(live: LiveServer) -> None:
    for path in sorted(OPEN_PATHS):
        reply = live.get(path)
        assert reply.status_code == 200
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        for foreign in ("http://", "https://"):
            assert foreign not in reply.text.replace("http://www.w3.org/2000/svg", "")
        if path.endswith(".js"):
            assert not [
                way for way in ("innerHTML", "insertAdjacentHTML", "eval(", "document.write") if way in reply.text
            ]
    page = live.get("/dashboard").text
    assert " style=" not in page
    assert "<script>" not in page


def test_the_page_is_open_and_its_feed_asks_for_the_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"viewer:{KEY}\n")
    with watched_server(tokenizer, server={"security": {"api_keys_file": str(keys)}}) as live:
        assert {live.get(path).status_code for path in OPEN_PATHS} == {200}
        for path in (FEED, "/dashboard/other.js", "/dashboard/"):
            assert live.get(path).status_code == 401
        with httpx.stream("GET", live.url + FEED, headers={"Authorization": f"Bearer {KEY}"}) as response:
            assert response.status_code == 200
            assert next(response.iter_lines()).startswith("data: ")


def test_one_switch_turns_it_off(tokenizer: Tokenizer) -> None:
    with watched_server(tokenizer, server={"dashboard": False}) as live:
        assert {live.get(path).status_code for path in (*OPEN_PATHS, FEED)} == {404}


def test_an_open_feed_does_not_hold_up_the_end_of_the_server(tokenizer: Tokenizer) -> None:
    with watched_server(tokenizer) as live, closing(httpx.Client(timeout=TIMEOUT_S)) as client:
        with client.stream("GET", live.url + FEED) as response:
            lines = response.iter_lines()
            next(lines)
            start = time.monotonic()
            live.stop()
            assert list(lines)[-2] == ": the end"
        assert time.monotonic() - start < 5
