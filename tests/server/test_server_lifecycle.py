"""The server from its first moment to its last: loading, disconnects, the engine's death, shutdown."""

import copy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from live_server import LiveServer, serving

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerSection
from server.engine.async_engine import AsyncEngine, Progress
from server.serve import listen

FOREVER = 10**9
TIMEOUT_S = 20.0
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def served(
    engine: FakeEngine | Callable[[Progress], FakeEngine], tokenizer: Tokenizer, shutdown_timeout_s: float = 5.0
) -> Iterator[LiveServer]:
    load = (lambda progress: engine) if isinstance(engine, FakeEngine) else engine
    with serving(
        lambda async_engine: create_app(async_engine, tokenizer), lambda: AsyncEngine(load), shutdown_timeout_s
    ) as live:
        if isinstance(engine, FakeEngine):
            live.wait_until_ready()
        yield live


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def test_the_server_answers_while_it_loads_and_tells_how_far_it_is(tokenizer: Tokenizer) -> None:
    may_finish = threading.Event()

    def load(progress: Progress) -> FakeEngine:
        progress("programs", 3, 8)
        may_finish.wait()
        return FakeEngine()

    with served(load, tokenizer) as live:
        wait_for(lambda: "phase" in live.get("/health").json())
        health = live.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "loading", "phase": "programs", "done": 3, "total": 8}
        for reply in (live.get("/v1/models"), live.get("/v1/models/fake"), live.post("/v1/chat/completions", CHAT)):
            assert reply.status_code == 503
            assert reply.json()["error"]["type"] == "service_unavailable_error"
            assert int(reply.headers["retry-after"]) > 0
        assert live.get("/metrics").status_code == 200
        assert "jaxserve:pages_total" not in live.get("/metrics").text
        may_finish.set()
        live.wait_until_ready()
        assert live.get("/health").json() == {"status": "ready"}
        assert live.post("/v1/chat/completions", CHAT).status_code == 200


def test_a_failed_load_makes_health_say_so(tokenizer: Tokenizer) -> None:
    def load(progress: Progress) -> FakeEngine:
        raise ConfigError("no memory")

    with served(load, tokenizer) as live:
        wait_for(lambda: live.get("/health").json()["status"] == "dead")
        assert live.get("/health").status_code == 503
        assert live.post("/v1/chat/completions", CHAT).status_code == 500


def test_models_are_listed_and_shown(tokenizer: Tokenizer) -> None:
    with served(FakeEngine(model_name="meta/llama"), tokenizer) as live, live.openai() as client:
        assert [model.id for model in client.models.list()] == ["meta/llama"]
        model = client.models.retrieve("meta/llama")
        assert (model.id, model.object, model.owned_by) == ("meta/llama", "model", "jaxserve")
        assert model.model_extra == {"max_model_len": 64}
        assert live.get("/version").json().keys() == {"version"}


def test_metrics_tell_requests_times_and_the_engines_counters(tokenizer: Tokenizer) -> None:
    with served(FakeEngine(), tokenizer) as live, live.openai() as client:
        client.completions.create(model="fake", prompt=[5, 6], max_tokens=3, n=2)
        client.completions.create(model="fake", prompt="one two three", max_tokens=9, stop=" two")
        live.post("/v1/completions", {"model": "fake", "prompt": ""})
        text = live.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain")
        assert live.metric("request_success_total", finished_reason="length") == 2
        assert live.metric("request_success_total", finished_reason="stop") == 1
        assert live.metric("requests_refused_total") == 1
        assert live.metric("client_disconnects_total") == 0
        assert live.metric("time_to_first_token_seconds_count") == 3
        assert live.metric("inter_token_latency_seconds_count") == 2 * 2 + 1
        assert live.metric("pages_total") == 8
        assert live.metric("compilations_total") == 3
        for name in ("pages_free", "pages_active", "pages_cached", "num_requests_running", "num_requests_waiting"):
            assert f'\njaxserve:{name}{{model_name="fake"}} ' in text.text
        for name in ("num_preemptions", "compilations_after_ready", "prompt_tokens", "generation_tokens", "steps"):
            assert f'\njaxserve:{name}_total{{model_name="fake"}} ' in text.text


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_aborts_its_requests(tokenizer: Tokenizer, n: int) -> None:
    fake = FakeEngine(max_model_len=FOREVER)
    with served(fake, tokenizer) as live, live.openai() as client:
        stream = client.chat.completions.create(**CHAT, stream=True, n=n)
        next(iter(stream))
        assert len(fake.requests) == n
        stream.close()
        wait_for(lambda: not fake.requests)
        assert live.metric("client_disconnects_total") == n


def test_a_client_that_leaves_before_the_first_token_aborts_its_request(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=FOREVER)
    fake.may_step.clear()
    with served(fake, tokenizer) as live:
        with httpx.stream("POST", live.url + "/v1/chat/completions", json={**CHAT, "stream": True}):
            wait_for(lambda: bool(fake.requests))
        wait_for(lambda: live.metric("client_disconnects_total") == 1)
        fake.may_step.set()
        wait_for(lambda: not fake.requests)


def test_a_client_that_leaves_an_unstreamed_answer_aborts_its_request(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=FOREVER)
    with served(fake, tokenizer) as live:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + "/v1/chat/completions", json=CHAT, timeout=0.3)
        wait_for(lambda: not fake.requests)
        assert live.metric("client_disconnects_total") == 1
        assert live.post("/v1/chat/completions", {**CHAT, "max_tokens": 2}).status_code == 200


def test_a_client_that_leaves_while_it_sends_its_body_harms_nobody(tokenizer: Tokenizer) -> None:
    with served(FakeEngine(), tokenizer) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b'Content-Length: 1000\r\n\r\n{"model": '
            )
        assert live.post("/v1/chat/completions", {**CHAT, "max_tokens": 2}).status_code == 200


def test_the_engines_death_ends_whole_answers_with_a_500_and_streams_with_an_error(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=FOREVER, die_at_step=50)
    fake.may_step.clear()
    with served(fake, tokenizer) as live, live.openai() as client:
        stream = client.chat.completions.create(**CHAT, stream=True)
        replies: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: replies.append(live.post("/v1/chat/completions", CHAT)))
        asking.start()
        wait_for(lambda: live.engine.num_open == 2)
        fake.may_step.set()
        with pytest.raises(openai.APIError, match="RuntimeError"):
            list(stream)
        asking.join()
        assert replies[0].status_code == 500
        assert replies[0].json()["error"]["code"] == "engine_dead"
        assert live.get("/health").status_code == 503
        assert live.get("/health").json() == {"status": "dead", "error": "RuntimeError"}
        assert live.post("/v1/chat/completions", {**CHAT, "stream": True}).status_code == 500
        assert live.metric("request_success_total", finished_reason="error") == 2
        assert live.metric("client_disconnects_total") == 0


def test_a_stream_that_breaks_has_no_done(tokenizer: Tokenizer) -> None:
    with served(FakeEngine(max_model_len=FOREVER, die_at_step=5), tokenizer) as live:
        text = live.post("/v1/chat/completions", {**CHAT, "stream": True}).text
        assert '"error":{"message":' in text.splitlines()[-2]
        assert "[DONE]" not in text


def test_a_shutdown_lets_running_streams_end(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=FOREVER)
    fake.may_step.clear()
    with served(fake, tokenizer, shutdown_timeout_s=TIMEOUT_S) as live, live.openai() as client:
        stream = client.completions.create(model="fake", prompt=[500], max_tokens=7, stream=True)
        wait_for(lambda: live.engine.num_open == 1)
        live.stop()
        wait_for(lambda: live.engine.state == "draining")
        fake.may_step.set()
        chunks = list(stream)
        assert len(chunks) == 7
        assert chunks[-1].choices[0].finish_reason == "length"


def test_a_shutdown_ends_endless_streams_with_reason_abort_and_right_usage(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=FOREVER)
    with served(fake, tokenizer, shutdown_timeout_s=0.1) as live, live.openai() as client:
        stream = client.completions.create(
            model="fake",
            prompt=[5],
            max_tokens=10**8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        live.stop()
        chunks = list(stream)
        assert chunks[-2].choices[0].finish_reason == "abort"
        usage = chunks[-1].usage
        assert usage is not None
        sent = sum(len(choice.model_extra["token_ids"]) for chunk in chunks for choice in chunk.choices)
        assert (usage.prompt_tokens, usage.completion_tokens) == (1, sent)


def test_a_templates_refusal_is_a_400_in_its_own_words(tokenizer: Tokenizer) -> None:
    strict = copy.copy(tokenizer)
    strict.chat_templates = {"default": "{{ raise_exception('users go first') }}"}
    with served(FakeEngine(), strict) as live:
        reply = live.post("/v1/chat/completions", {**CHAT, "stream": True})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages"
        assert "users go first" in reply.json()["error"]["message"]


def test_chats_of_a_model_without_a_template_are_a_400_and_completions_work(tokenizer: Tokenizer) -> None:
    plain = copy.copy(tokenizer)
    plain.chat_templates = {}
    with served(FakeEngine(), plain) as live:
        reply = live.post("/v1/chat/completions", CHAT)
        assert reply.status_code == 400
        assert "/v1/completions" in reply.json()["error"]["message"]
        assert live.post("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 1}).status_code == 200


def test_an_unforeseen_error_is_a_500_that_tells_nothing_of_the_inside(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeEngine):
        def check_room(self, *_: object, **__: object) -> None:
            raise KeyError("a secret")

    with served(Broken(), tokenizer) as live:
        reply = live.post("/v1/chat/completions", CHAT)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal_error"
        assert "secret" not in reply.text
    assert "a secret" in caplog.text


def test_an_address_in_use_is_told_with_its_keys() -> None:
    with listen(ServerSection(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*server.port"):
            listen(ServerSection(port=port))
