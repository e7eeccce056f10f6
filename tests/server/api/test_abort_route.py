"""POST /abort and /load: a request ends by its id from another connection, and the load tells of it."""

from typing import Any

import openai
from live_server import LiveServer

LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": [5, 6, 7],
    "max_tokens": 125,
    "n": 3,
    "extra_body": {"ignore_eos": True},
}


def test_an_aborted_stream_ends_each_choice_once_with_its_usage(server: LiveServer, client: openai.OpenAI) -> None:
    reasons: dict[int, str] = {}
    tokens = 0
    aborted = 0
    with client.completions.create(**LONG, stream=True, stream_options={"include_usage": True}) as chunks:
        for chunk in chunks:
            if not aborted:
                assert server.get("/load").json()["server_load"] >= 3
                aborted = server.post("/abort", {"request_id": chunk.id}).json()["aborted"]
            for choice in chunk.choices:
                assert choice.index not in reasons
                if choice.finish_reason is not None:
                    reasons[choice.index] = choice.finish_reason
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
    assert aborted == 3
    assert reasons == dict.fromkeys(range(3), "abort")
    assert 0 < tokens < 3 * 125
    assert server.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}


def test_an_id_that_is_not_running_aborts_nothing(server: LiveServer, client: openai.OpenAI) -> None:
    ended = client.completions.create(model="tiny", prompt=[5], max_tokens=1)
    for request_id in (ended.id, "cmpl-unknown", ended.id + "-0"):
        assert server.post("/abort", {"request_id": request_id}).json() == {"request_id": request_id, "aborted": 0}
