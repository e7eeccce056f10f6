"""Real signals to real processes: what runs may end, what comes late is told so, and nothing hangs for ever."""

import signal
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from fake_engine import BAD_TOKEN, FakeEngine
from fake_process import ServerProcess, fake_process
from live_server import serving

from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.engine.async_engine import AsyncEngine

FOREVER = 10**9
TIMEOUT_S = 30.0


def wait_until(server: ServerProcess, path: str, status: int) -> httpx.Response:
    deadline = time.monotonic() + TIMEOUT_S
    while (reply := server.get(path)).status_code != status:
        assert time.monotonic() < deadline, reply.text
        time.sleep(0.01)
    return reply


def stream(client: openai.OpenAI, **fields: Any) -> openai.Stream[Any]:
    return client.completions.create(
        **{"model": "fake", "prompt": [500], "stream": True, "max_tokens": FOREVER, **fields}
    )


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_streams_end_and_late_requests_are_told(end: signal.Signals) -> None:
    with fake_process({"max_model_len": 2 * FOREVER, "step_s": 0.02}, {"shutdown_timeout_s": TIMEOUT_S}) as server:
        with server.openai() as client, httpx.Client(base_url=server.url) as kept_alive:
            assert kept_alive.get("/ready").status_code == 200
            running = stream(client, max_tokens=60)
            next(iter(running))
            server.signal(end)
            assert wait_until(server, "/ready", 503).json() == {"status": "draining"}
            assert server.get("/live").status_code == 200
            for late in (server.post, lambda path, body: kept_alive.post(path, json=body)):
                reply = late("/v1/completions", {"model": "fake", "prompt": "late"})
                assert reply.status_code == 503
                assert int(reply.headers["retry-after"]) > 0
            chunks = list(running)
            assert len(chunks) == 59
            assert chunks[-1].choices[0].finish_reason == "length"
        status, told = server.end()
        assert (status, "Traceback" in told) == (0, False)


def test_a_drain_is_bounded_and_what_is_left_ends_as_aborted() -> None:
    with fake_process({"max_model_len": 2 * FOREVER}, {"shutdown_timeout_s": 0.2}) as server, server.openai() as client:
        running = stream(client)
        next(iter(running))
        server.signal(signal.SIGTERM)
        assert list(running)[-1].choices[0].finish_reason == "abort"
        assert server.end()[0] == 0


def test_a_second_signal_aborts_what_the_first_would_have_waited_for() -> None:
    with fake_process({"max_model_len": 2 * FOREVER}, {"shutdown_timeout_s": 600}) as server, server.openai() as client:
        running = stream(client)
        next(iter(running))
        server.signal(signal.SIGTERM)
        wait_until(server, "/ready", 503)
        server.signal(signal.SIGTERM)
        assert list(running)[-1].choices[0].finish_reason == "abort"
        assert server.end()[0] == 0


def failing_requests(server: ServerProcess) -> tuple[BaseException | None, httpx.Response]:
    """One streamed and one whole request at once: how the stream broke, and the whole answer."""
    whole: list[httpx.Response] = []
    body = {"model": "fake", "prompt": [5], "max_tokens": FOREVER}
    asking = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", body)))
    asking.start()
    broken: BaseException | None = None
    with server.openai() as client:
        try:
            list(stream(client))
        except openai.APIError as error:
            broken = error
    asking.join()
    return broken, whole[0]


def test_the_engines_death_fails_every_open_request_and_ends_the_process_with_an_error() -> None:
    with fake_process({"max_model_len": 2 * FOREVER, "step_s": 0.01, "die_at_step": 40}) as server:
        broken, whole = failing_requests(server)
        assert "RuntimeError" in str(broken)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_dead")
        status, told = server.end()
        assert status != 0
        assert "the device is on fire" in told.splitlines()[-1]


def test_a_step_that_hangs_trips_the_watchdog() -> None:
    options = {"max_model_len": 2 * FOREVER, "step_s": 0.01, "hang_at_step": 40}
    with fake_process(options, {"step_timeout_s": 0.5}) as server:
        broken, whole = failing_requests(server)
        assert "StuckStepError" in str(broken)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_dead")
        status, told = server.end()
        assert status != 0
        assert "server.step_timeout_s" in told.splitlines()[-1]


def test_slow_steps_and_long_idle_times_do_not_trip_the_watchdog() -> None:
    with fake_process({"step_s": 0.2}, {"step_timeout_s": 0.6}) as server:
        time.sleep(1.0)
        assert server.post("/v1/completions", {"model": "fake", "prompt": [5], "max_tokens": 5}).status_code == 200
        assert server.get("/health").status_code == 200


def test_a_request_whose_numbers_go_wrong_fails_alone(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=2 * FOREVER, step_s=0.01)
    with serving(lambda engine: create_app(engine, tokenizer), lambda: AsyncEngine(lambda _: fake)) as live:
        live.wait_until_ready()
        with live.openai() as client:
            good = stream(client, max_tokens=50)
            next(iter(good))
            with pytest.raises(openai.InternalServerError, match="not finite"):
                client.completions.create(model="fake", prompt=[BAD_TOKEN], max_tokens=9)
            with pytest.raises(openai.APIError, match="not finite"):
                list(stream(client, prompt=[BAD_TOKEN], max_tokens=9))
            assert list(good)[-1].choices[0].finish_reason == "length"
        assert live.get("/health").status_code == 200
        assert not fake.requests
