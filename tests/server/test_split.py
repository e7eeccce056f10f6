"""Front ends apart from the engine: the same answers, and each side outlives the other's sudden end."""

import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fake_engine import BAD_TOKEN
from fake_process import ServerProcess
from split_processes import engine_process, front_end

FOREVER, MANY = 10**9, 10**8
TIMEOUT_S = 40.0


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def is_ready(front: ServerProcess) -> bool:
    return front.get("/ready").status_code == 200


def load(front: ServerProcess) -> dict[str, Any]:
    return dict(front.get("/load").json())


def stream(client: openai.OpenAI, **fields: Any) -> openai.Stream[Any]:
    return client.completions.create(**{"model": "fake", "prompt": [500], "stream": True, "max_tokens": MANY, **fields})


def test_front_ends_come_and_go_and_the_engine_stays_clean() -> None:
    address = free_address()
    with front_end(address) as first:
        assert first.get("/live").status_code == 200
        wait_for(lambda: first.get("/ready").json() == {"status": "unreachable"})
        late = first.post("/v1/completions", {"model": "fake", "prompt": [5]})
        assert (late.status_code, "retry-after" in late.headers) == (503, True)
        with engine_process(address, {"max_model_len": FOREVER, "step_s": 0.005}), front_end(address) as second:
            wait_for(lambda: is_ready(first) and is_ready(second))
            for front in (first, second):
                with front.openai() as client:
                    whole = client.completions.create(
                        model="fake", prompt="one two three", max_tokens=9, n=2, stop=" two", logprobs=1, seed=3
                    )
                    assert [choice.text for choice in whole.choices] == ["one", "one"]
                    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
                    chunks = list(stream(client, max_tokens=5, prompt=[500, 501]))
                    assert len(chunks) == 5
                    with pytest.raises(openai.BadRequestError) as caught:  # before any stream begins
                        stream(client, prompt=[10**6])
                    assert caught.value.param == "prompt"
                    with pytest.raises(openai.InternalServerError, match="not finite"):
                        client.completions.create(model="fake", prompt=[BAD_TOKEN], max_tokens=5)
            metrics = second.get("/metrics").text
            assert 'jaxserve:pages_total{model_name="fake"} 8.0' in metrics

            # A front end is killed with streams open: the engine drops them, and the other notices nothing.
            with first.openai() as client, second.openai() as other:
                doomed, kept = stream(client, n=3), stream(other, max_tokens=400)
                next(iter(doomed))
                next(iter(kept))
                wait_for(lambda: load(second)["running"] == 4)
                first.signal(signal.SIGKILL)
                with pytest.raises((openai.APIError, httpx.HTTPError)):
                    list(doomed)
                assert list(kept)[-1].choices[0].finish_reason == "length"
            wait_for(lambda: load(second)["running"] == 0)

            # A client that leaves, and an abort by id, reach the engine through the front end.
            with second.openai() as client:
                gone = stream(client)
                next(iter(gone))
                gone.close()
                wait_for(lambda: load(second)["running"] == 0)
                aborted = stream(client, n=2)
                request_id = next(iter(aborted)).id
                assert second.post("/abort", {"request_id": request_id}).json()["aborted"] == 2
                assert {c.choices[0].finish_reason for c in aborted} == {None, "abort"}


def test_a_killed_engine_is_a_503_until_it_is_back() -> None:
    address = free_address()
    options = {"max_model_len": FOREVER, "step_s": 0.005}
    with front_end(address) as front, front.openai() as client:
        with engine_process(address, options) as engine:
            wait_for(lambda: is_ready(front))
            broken = stream(client)
            next(iter(broken))
            engine.signal(signal.SIGKILL)
            with pytest.raises(openai.APIError, match="cannot be reached"):
                list(broken)
        wait_for(lambda: not is_ready(front))
        reply = front.post("/v1/completions", {"model": "fake", "prompt": [5]})
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
        assert front.get("/live").status_code == 200
        with engine_process(address, options):
            wait_for(lambda: is_ready(front))
            assert client.completions.create(model="fake", prompt=[5], max_tokens=2).usage.completion_tokens == 2


def test_an_engine_that_drains_lets_streams_end_and_its_front_end_says_so() -> None:
    address = free_address()
    options = {"max_model_len": FOREVER, "step_s": 0.01}
    with (
        front_end(address) as front,
        front.openai() as client,
        engine_process(address, options, {"shutdown_timeout_s": TIMEOUT_S}) as engine,
    ):
        wait_for(lambda: is_ready(front))
        running = stream(client, max_tokens=150)
        next(iter(running))
        engine.signal(signal.SIGTERM)
        wait_for(lambda: front.get("/ready").json()["status"] == "draining")
        assert front.post("/v1/completions", {"model": "fake", "prompt": [5]}).status_code == 503
        assert list(running)[-1].choices[0].finish_reason == "length"
        assert engine.end()[0] == 0


def test_a_front_end_drains_like_any_server() -> None:
    address = free_address()
    with engine_process(address, {"max_model_len": FOREVER, "step_s": 0.01}), front_end(address) as front:
        wait_for(lambda: is_ready(front))
        with front.openai() as client:
            running = stream(client, max_tokens=100)
            next(iter(running))
            front.signal(signal.SIGTERM)
            wait_for(lambda: front.get("/ready").json()["status"] == "draining")
            assert list(running)[-1].choices[0].finish_reason == "length"
        assert front.end()[0] == 0
