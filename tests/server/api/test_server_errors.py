"""Bad input over HTTP: a 4xx of OpenAI's shape that names the field, before any stream; neighbours notice nothing."""

import json
import threading
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer

from jaxserve.errors import InvalidRequestError
from jaxserve.text.tokenizer import Tokenizer
from server.errors import describe

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 5}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
VOCAB_SIZE = 49152
MAX_MODEL_LEN = 128


def check(reply: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    return error


BAD_COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", [VOCAB_SIZE]),
    ("prompt", [-1]),
    ("prompt", [5, 2**40]),
    ("prompt", [[5], [VOCAB_SIZE]]),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [1.5]),
    ("prompt", {"text": "x"}),
    ("prompt", [7] * MAX_MODEL_LEN),
    ("prompt", [7] * (MAX_MODEL_LEN + 1)),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"-1": 1}),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [-1]),
    ("allowed_token_ids", [VOCAB_SIZE]),
    ("allowed_token_ids", []),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", MAX_MODEL_LEN - 2),  # with the 3 tokens of the prompt one too many
    ("max_tokens", 10**9),
    ("max_tokens", 10**18),
    ("min_tokens", 6),
    ("temperature", "hot"),
    ("temperature", None),  # replaced below by a number that JSON lacks
    ("n", 0),
    ("stop", [""]),
    ("logprobs", 21),
    ("best_of", 3),
    ("unknown_parameter", 1),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("param", "value"), BAD_COMPLETIONS, ids=lambda value: str(value)[:30])
def test_bad_completions_are_refused_by_field(server: LiveServer, param: str, value: Any, stream: bool) -> None:
    body = json.dumps({**COMPLETION, param: value, "stream": stream})
    if value is None:
        body = body.replace(f'"{param}": null', f'"{param}": 1e999')
    check(server.post("/v1/completions", body.encode()), 400, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 200}]}, "messages"),
        ({"max_tokens": 125}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 125}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
    ],
    ids=str,
)
def test_bad_chats_are_refused_by_field(server: LiveServer, fields: dict[str, Any], param: str, stream: bool) -> None:
    check(server.post("/v1/chat/completions", {**CHAT, **fields, "stream": stream}), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"model": "tiny", "prompt": "x", "top_p": Infinity}', "top_p"),
        (b'{"model": "tiny", "prompt": "x", "logit_bias": {"5": -Infinity}}', "logit_bias.5"),
        (b'{"model": "tiny", "prompt": "x\\ud800"}', "prompt"),
        (b'{"model": "tiny", "prompt": "x", "stop": ["\\udc00"]}', "stop[0]"),
        (b'{"model": "tiny"}', "prompt"),
        (b'{"prompt": "x"}', "model"),
        (b"[" * 100_000, None),
        (b"", None),
        (b"{]", None),
        (b"\xff", None),
        (b'"x"', None),
    ],
)
def test_bodies_that_json_or_unicode_forbid_are_refused(server: LiveServer, body: bytes, param: str | None) -> None:
    check(server.post("/v1/completions", body), 400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * 10**4: 1},
        {"model": "x" * 10**4},
        {"stream_options": {"x" * 10**4: 1}},
        {"messages": [{"role": "x" * 10**4, "content": "hi"}]},
        {"tool_choice": "x" * 10**4},
    ],
    ids=range(5),
)
def test_an_error_repeats_little_of_what_was_sent(server: LiveServer, fields: dict[str, Any]) -> None:
    reply = server.post("/v1/chat/completions", {**CHAT, "stream": True, **fields})
    assert reply.status_code in (400, 404)
    assert len(reply.content) < 1500
    assert len(describe(InvalidRequestError("x" * 10**4)).message) < 2500


def test_prompts_up_to_the_limit_are_served_and_one_more_is_not(server: LiveServer, client: openai.OpenAI) -> None:
    for length, max_tokens in ((MAX_MODEL_LEN - 1, 1), (MAX_MODEL_LEN - 2, 2)):
        usage = client.completions.create(model="tiny", prompt=[7] * length, max_tokens=max_tokens).usage
        assert usage is not None
        assert usage.prompt_tokens == length
    error = check(server.post("/v1/completions", {**COMPLETION, "prompt": [7] * MAX_MODEL_LEN}), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "128 tokens" in error["message"]
    assert "max_model_len" in error["message"]


def test_an_unknown_model_is_a_404_that_names_the_served_one(server: LiveServer, client: openai.OpenAI) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        error = check(server.post(path, {**body, "model": "gpt-4o"}), 404, "model")
        assert error["code"] == "model_not_found"
        assert "'tiny'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_unknown_routes_and_methods_have_openais_shape(server: LiveServer) -> None:
    assert check(server.get("/v1/nothing"), 404, None)["code"] == "route_not_found"
    reply = server.get("/v1/completions")
    assert check(reply, 405, None)["code"] == "method_not_allowed"
    assert reply.headers["allow"] == "POST"


def test_a_body_over_the_limit_is_a_413_whether_or_not_its_length_is_declared(server: LiveServer) -> None:
    body = json.dumps({**COMPLETION, "prompt": "x" * 200_000}).encode()
    check(server.post("/v1/completions", body), 413, None)
    pieces = (body[i : i + 10_000] for i in range(0, len(body), 10_000))
    headers = {"content-type": "application/json"}
    check(httpx.post(server.url + "/v1/completions", content=pieces, headers=headers), 413, None)


def test_a_body_that_is_no_json_by_its_own_word_is_a_415(server: LiveServer) -> None:
    reply = httpx.post(server.url + "/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    check(reply, 415, None)


def test_the_client_sees_its_own_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[VOCAB_SIZE])
    assert caught.value.param == "prompt"
    assert str(VOCAB_SIZE) in caught.value.message


def test_bad_neighbours_change_nothing_for_a_good_request(
    server: LiveServer, client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    good = {**COMPLETION, "max_tokens": 100, "logprobs": 1}
    alone = client.completions.create(**good).choices[0]
    compilations, refused = (
        server.metric("compilations_total"),
        server.metric("requests_refused_total"),
    )
    stop = threading.Event()
    statuses = []

    def pester() -> None:
        while not stop.is_set():
            for param, value in BAD_COMPLETIONS:
                if value is not None:
                    statuses.append(server.post("/v1/completions", {**COMPLETION, param: value}).status_code)

    pest = threading.Thread(target=pester)
    pest.start()
    try:
        for _ in range(3):
            beside = client.completions.create(**good).choices[0]
            assert beside.text == alone.text
            assert beside.logprobs is not None
            assert alone.logprobs is not None
            assert beside.logprobs.token_logprobs == pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)
    finally:
        stop.set()
        pest.join()
    assert set(statuses) == {400}
    assert server.metric("requests_refused_total") == refused + len(statuses)
    assert server.metric("compilations_total") == compilations
    assert server.metric("pages_active") == 0
