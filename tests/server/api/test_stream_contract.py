"""What every stream keeps to, read off the bytes: order, one end a choice, no choice ending another, nothing held."""

import json
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from live_server import TIMEOUT_S, LiveServer

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Count to a hundred, slowly and with feeling. " * 2}],
    "temperature": 0,
    "max_tokens": 24,
}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Grüße 🎉 an", "temperature": 0, "max_tokens": 24}


def stream(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events' payloads; the last one was `[DONE]`, and nothing followed."""
    reply = httpx.post(server.url + path, json={**body, "stream": True}, timeout=TIMEOUT_S)
    assert reply.status_code == 200, reply.text
    lines = reply.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_chat_streams_role_deltas_finish_usage_done(server: LiveServer) -> None:
    body = {**CHAT, "n": 3, "temperature": 1, "seed": 4, "logprobs": True, "stream_options": {"include_usage": True}}
    *chunks, last = stream(server, "/v1/chat/completions", body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3 * 24
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    by_choice: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        by_choice[choice["index"]].append(choice)
    assert sorted(by_choice) == [0, 1, 2]
    for choices in by_choice.values():
        first, *middle, end = choices
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(choice["delta"].keys() == {"content"} for choice in middle)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert end["delta"] == {}
        assert sum(len(choice["logprobs"]["content"]) for choice in middle) == 24


def test_a_choice_that_stops_ends_no_other(server: LiveServer, client: openai.OpenAI) -> None:
    prompts = ["Grüße 🎉 an", "Es war einmal"]
    texts = [client.completions.create(**{**COMPLETION, "prompt": prompt}).choices[0].text for prompt in prompts]
    stop = next(texts[0][i : i + 4] for i in range(len(texts[0]) - 4) if texts[0][i : i + 4] not in texts[1])
    ended: dict[int, str] = {}
    shown: dict[int, str] = defaultdict(str)
    for event in stream(server, "/v1/completions", {**COMPLETION, "prompt": prompts, "stop": stop}):
        for choice in event["choices"]:
            assert choice["index"] not in ended
            shown[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                ended[choice["index"]] = choice["finish_reason"]
    assert ended == {0: "stop", 1: "length"}
    assert shown == {0: texts[0][: texts[0].index(stop)], 1: texts[1]}


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_text_that_only_begins_a_stop_string_is_shown_with_the_same_logprobs(server: LiveServer, kept: int) -> None:
    """The stop string begins as the output does at some place, and then goes on as it does not."""
    plain = server.post("/v1/completions", COMPLETION).json()["choices"][0]["text"]
    stop = plain[10 : 10 + kept] + "\x00"
    body = {**COMPLETION, "stop": [stop], "logprobs": 2, "echo": True}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    assert whole["text"] == COMPLETION["prompt"] + plain
    text = ""
    joined: dict[str, list[Any]] = defaultdict(list)
    for event in stream(server, "/v1/completions", body):
        (choice,) = event["choices"]
        text += choice["text"]
        lengths = {len(entries) for entries in (choice["logprobs"] or {}).values()}
        assert len(lengths) <= 1, "chunks of unequal arrays"
        for name, entries in (choice["logprobs"] or {}).items():
            joined[name] += entries
        # What is held back can still become the stop string, or is the beginning of a character.
        offsets = joined["text_offset"]
        assert not offsets or len(text) >= offsets[-1] - kept
    assert text == whole["text"]
    assert joined["tokens"] == whole["logprobs"]["tokens"]
    assert joined["text_offset"] == whole["logprobs"]["text_offset"]


def test_cached_prompt_tokens_are_told_streamed_and_whole(server: LiveServer) -> None:
    usages = [server.post("/v1/chat/completions", {**CHAT, "n": 2}).json()["usage"] for _ in range(2)]
    last = stream(server, "/v1/chat/completions", {**CHAT, "n": 2, "stream_options": {"include_usage": True}})[-1]
    assert last["usage"] == usages[1]
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < usages[1]["prompt_tokens"] == usages[0]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_aborted_stream_still_ends_whole(server: LiveServer, path: str) -> None:
    body = {**(CHAT if "chat" in path else COMPLETION), "max_tokens": 60, "n": 2, "ignore_eos": True}
    with httpx.stream(
        "POST",
        server.url + path,
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
        timeout=TIMEOUT_S,
    ) as reply:
        payloads = []
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                payloads.append(json.loads(line.removeprefix("data: ")))
                if len(payloads) == 1:
                    server.post("/abort", {"request_id": payloads[0]["id"]})
        assert line in ("", "data: [DONE]")
    reasons = [c["finish_reason"] for payload in payloads for c in payload["choices"] if c["finish_reason"]]
    assert len(reasons) == 2
    assert set(reasons) <= {"abort", "length"}
    assert payloads[-1]["choices"] == []
    assert payloads[-1]["usage"]["completion_tokens"] <= 120
