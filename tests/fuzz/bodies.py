"""Fuzzes request bodies of every POST route against a running server: never a 5xx but 503, never a stream without end."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st

from tests.fuzz.mutate import Draw, edited_bytes, json_bytes
from tests.fuzz.processes import Running, metrics_of, server_process, write_tiny_model
from tests.fuzz.target import Target

TIME_S = 60.0  # of one answer: the queue's worth of work on a busy machine
SETTLE_S = 60.0
# Few pages, so that preemption is common; short queue and timeout, so that the work of one request is bounded.
SETTINGS = (
    *("model.max_model_len=128", "cache.num_pages=17", "scheduler.max_num_seqs=8", "scheduler.max_queued_requests=32"),
    *("execution.decode_buckets=[8]", "execution.prefill_buckets=[2]", "scheduler.max_num_batched_tokens=72"),
    *("execution.compilation_cache=null", "execution.strict_shapes=true"),
    *("server.max_body_bytes=300000", "server.limits.request_timeout_s=20", "server.allow_chat_template=true"),
)
LEAKS = re.compile(r"Traceback|site-packages|\.py\b|/home/|/usr/|/root/|/opt/")
# The last event of a stream, by its route; an error event may take its place.
LAST_EVENTS = {
    "/v1/responses": ("response.completed", "response.incomplete", "response.failed", "response.cancelled"),
    "/v1/messages": ("message_stop",),
}
_TOOL = {"type": "function", "function": {"name": "look", "description": "x", "parameters": {"type": "object"}}}
_CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a river"}, {"type": "text", "text": "🙂"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": [1, 2]}'}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "a stone"},
        {"role": "user", "content": "and then?"},
    ],
    "max_tokens": 6,
}  # fmt: skip
_SAMPLED: dict[str, Any] = {
    "n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 7, "stop": ["e", "the"],
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 10, "6": -100},
    "stop_token_ids": [9], "min_tokens": 1, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
_RESPONSES: dict[str, Any] = {"model": "tiny", "input": "a river", "max_output_tokens": 6, "store": False}
_MESSAGES: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"model": "tiny", "prompt": "a river", "max_tokens": 6, "logprobs": 2, "echo": True},
        {"model": "tiny", "prompt": [[1, 2, 3], [4]], "max_tokens": 4, "prompt_logprobs": 1, "allowed_token_ids": [5]},
        {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 6, "bad_words": ["the"], **_SAMPLED},
    ),
    "/v1/chat/completions": (
        {**_CHAT, "tools": [_TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 3},
        {**_CHAT, **_SAMPLED, "chat_template_kwargs": {"x": 1}, "add_generation_prompt": True},
        {
            **_CHAT,
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
        },
    ),
    "/v1/responses": (
        {**_RESPONSES, "stream": True, "instructions": "Be brief.", "temperature": 0.5},
        {
            **_RESPONSES,
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "a stone"},
            ],
            "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "previous_response_id": None,
        },
    ),
    "/v1/responses/{response_id}/cancel": ({},),
    "/v1/messages": (
        {**_MESSAGES, "stream": True, "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["e"]},
        {
            **_MESSAGES,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a stone"}]},
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "temperature": 0.5,
            "top_k": 3,
        },
    ),
    "/v1/messages/count_tokens": ({key: value for key, value in _MESSAGES.items() if key != "max_tokens"},),
    "/v1/embeddings": (
        {"model": "tiny", "input": ["a river", "b"], "encoding_format": "base64"},
        {"model": "tiny", "input": [[1, 2], [3]], "user": "x", "dimensions": 32},
    ),
    "/v1/completions/render": ({"model": "tiny", "prompt": ["a river", "b"], "max_tokens": 6},),
    "/v1/chat/completions/render": (_CHAT,),
    "/tokenize": ({"model": "tiny", "prompt": "a river", "return_token_strs": True}, {**_CHAT, "max_tokens": None}),
    "/detokenize": ({"model": "tiny", "tokens": [1, 2, 3], "skip_special_tokens": True},),
    "/abort": ({"request_id": "x"},),
}
_CONTENT_TYPES = ("application/json",) * 20 + (
    "text/plain",
    "",
    "application/json; charset=utf-16",
    "multipart/form-data",
)


@st.composite
def requests(draw: Draw, routes: tuple[str, ...]) -> tuple[str, bytes, str]:
    """A path, a body and its content type. A route without a body here is sent what its neighbours take."""
    route = draw(st.sampled_from(routes))
    bodies = BODIES.get(route) or tuple(body for some in BODIES.values() for body in some)
    body = draw(st.sampled_from(bodies))
    kind = draw(st.integers(0, 19))
    if kind == 0:
        content = draw(st.binary(max_size=200))
    elif kind <= 2:
        content = draw(edited_bytes(json.dumps(body).encode()))
    else:
        names = sorted({name for some in bodies for name in some} | set(_SAMPLED))
        content = draw(json_bytes(body, names=names))
    return route.replace("{response_id}", "resp_1"), content, draw(st.sampled_from(_CONTENT_TYPES))


@contextmanager
def body_target(folder: Path) -> Iterator[Target]:
    """`folder`: scratch space."""
    model = write_tiny_model(folder)
    with server_process(model, SETTINGS, folder / "server.log") as server, httpx.Client(timeout=TIME_S) as http:
        paths = http.get(f"{server.address}/openapi.json").json()["paths"]
        routes = tuple(path for path, methods in paths.items() if "post" in methods)
        assert BODIES.keys() <= set(routes), BODIES.keys() - set(routes)

        def check(case: tuple[str, bytes, str]) -> str:
            path, content, media_type = case
            headers = {"content-type": media_type} if media_type else {}
            return check_answer(path, http.post(server.address + path, content=content, headers=headers))

        yield Target(name="bodies", cases=requests(routes), check=check, settle=lambda: check_idle(server))
        server.stop()


def check_answer(path: str, reply: httpx.Response) -> str:
    """Raises unless the answer is one that the API's documents know; returns its kind."""
    status = reply.status_code
    assert status < 500 or status == 503, f"{path} answered {status}: {reply.text[:500]}"
    text = reply.content.decode()
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        check_stream(path, text)
        return "stream"
    answer = json.loads(text, parse_constant=_refuse_constant)
    if status >= 400:
        error = answer["error"]
        assert isinstance(error["message"], str), text[:500]
        assert error["message"], text[:500]
        assert not LEAKS.search(text), text[:500]
        assert status != 503 or "retry-after" in reply.headers, text[:500]
    return f"{status // 100}xx"


def check_stream(path: str, text: str) -> None:
    """Raises unless the stream ends as its API says, and not with a fault of the server's own."""
    events = [event for event in text.split("\n\n") if event]
    data = [line[6:] for event in events for line in event.split("\n") if line.startswith("data: ")]
    assert data, f"an empty stream: {text[:500]!r}"
    assert not any('"internal_error"' in item for item in data), data[-2:]
    last = LAST_EVENTS.get(path)
    if last is None:
        assert data[-1] == "[DONE]", data[-2:]
        data = data[:-1]
    parsed = [json.loads(item, parse_constant=_refuse_constant) for item in data]
    assert last is None or parsed[-1]["type"] in (*last, "error"), data[-2:]


def check_idle(server: Running) -> None:
    """Raises unless the server is well, and soon nothing of what ran is left in it."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        server.check_alive()
        metrics = metrics_of(server.address)
        if not metrics["num_requests_running"] and not metrics["num_requests_waiting"]:
            break
        assert time.monotonic() < deadline, {name: metrics[name] for name in metrics if name.startswith("num_")}
        time.sleep(0.1)
    assert httpx.get(f"{server.address}/health", timeout=TIME_S).status_code == 200
    accepted, ended = metrics["requests_accepted_total"], metrics["request_success_total"]
    assert accepted == ended, f"{accepted:.0f} sequences were accepted, {ended:.0f} ended"
    assert metrics["pages_active"] == 0, metrics["pages_active"]
    assert metrics["pages_free"] + metrics["pages_cached"] == metrics["pages_total"], metrics
    assert metrics["page_slots_unused"] == 0, metrics["page_slots_unused"]
    assert metrics["compilations_after_ready_total"] == 0


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
