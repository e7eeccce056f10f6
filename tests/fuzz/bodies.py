"""Fuzzes request bodies of every POST route of a running server: no 5xx but 503, no stream without its end."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st

from tests.fuzz.mutate import Draw, edited_bytes, json_bytes
from tests.fuzz.target import Target
from tests.live_process import Running, metrics_of, server_process, write_tiny_model

TIME_S = 60.0  # of one answer: the queue's worth of work on a busy machine
SETTLE_S = 60.0
MAX_AT_ONCE = 6  # requests of one case, so that they meet in the engine
# Few pages, so that preemption is common; short queue and timeout, so that the work of one request is bounded.
SETTINGS = (
    *("model.max_model_len=128", "cache.num_pages=17", "scheduler.max_num_seqs=8", "scheduler.max_queued_requests=32"),
    *("execution.decode_buckets=[8]", "execution.prefill_buckets=[2]", "scheduler.max_num_batched_tokens=72"),
    "execution.strict_shapes=true",
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
# Values that a field may have, its edges included: bodies of these are mostly served.
_TEXTS = ("a", "the river 🙂", "<|im_end|>", "\ufffd\u200d", " " * 40, "x" * 2000, "日本" * 20, "{{ x }}", "\0")
FIELDS: dict[str, tuple[Any, ...]] = {
    "prompt": (*_TEXTS, [0], [49151], list(range(100)), [[1], [2, 3]], ["a", "b", "c"], [1] * 127, [1] * 128),
    "input": (*_TEXTS, [0], ["a", "b"], [[1], [2, 3]]),
    "messages": (
        *([{"role": role, "content": text}] for role in ("user", "system", "assistant") for text in _TEXTS),
        [{"role": "user", "content": text} for text in _TEXTS],
        [{"role": "user"}, {"role": "assistant", "content": None}, {"role": "user", "content": []}],
    ),
    "n": (1, 2, 3, 8, 128),
    "max_tokens": (1, 2, 16, 126, 127, 128),
    "max_completion_tokens": (1, 16),
    "max_output_tokens": (1, 16, 128),
    "min_tokens": (0, 1, 5),
    "temperature": (0, 1e-9, 0.5, 1, 2, 100),
    "top_p": (1e-12, 0.1, 1),
    "top_k": (-1, 0, 1, 2, 49152, 2**31 - 1),
    "min_p": (0, 1e-9, 1),
    "repetition_penalty": (1e-9, 0.5, 1, 100),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0, 2),
    "logit_bias": ({}, {"0": 100}, {"49151": -100}, {str(token_id): 0.5 for token_id in range(1000)}),
    "allowed_token_ids": ([0], [49151], list(range(2000))),
    "bad_words": (["a"], ["the river"], ["🙂", "x" * 100]),
    "seed": (0, -1, 2**63 - 1, -(2**63)),
    "stop": ("a", ["a", "b"], ["\ufffd"], ["🙂"], [" "], ["x" * 500], [str(number) for number in range(16)]),
    "stop_sequences": (["a"], ["🙂"]),
    "stop_token_ids": ([0], list(range(2000))),
    "ignore_eos": (True, False),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (False,),
    "logprobs": (0, 1, 20, True, False),
    "top_logprobs": (0, 5, 20),
    "prompt_logprobs": (0, 1, 20),
    "return_token_ids": (True,),
    "echo": (True,),
    "priority": (-100, 100),
    "cache_salt": ("a", "🙂"),
    "deadline_ms": (1, 50, 5000),
    "queue_timeout_ms": (1, 5000),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
    "store": (True, False),
    "previous_response_id": ("resp_1",),
    "tools": ([_TOOL], []),
    "tool_choice": ("none", "auto"),
    "chat_template": (
        "{{ messages[0].content }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ),
    "chat_template_kwargs": ({}, {"a": [1]}, {"messages": []}),
    "tokens": ([0], [49151, 49152], [-1], list(range(3000))),
    "encoding_format": ("float", "base64"),
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
    if kind >= 8:  # a body that may well be served
        fields = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=5, unique=True))
        known = set().union(*(BODIES.get(route) or bodies)) | _SAMPLED.keys()
        chosen = {name: draw(st.sampled_from(FIELDS[name])) for name in fields if name in known}
        content = json.dumps({**body, **chosen}).encode()
    elif kind == 0:
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
    with (
        server_process(model, SETTINGS, folder / "server.log") as server,
        httpx.Client(timeout=TIME_S) as http,
        ThreadPoolExecutor(MAX_AT_ONCE) as pool,
    ):
        paths = http.get(f"{server.address}/openapi.json").json()["paths"]
        routes = tuple(path for path, methods in paths.items() if "post" in methods)
        assert BODIES.keys() <= set(routes), BODIES.keys() - set(routes)

        def ask(request: tuple[str, bytes, str]) -> str:
            path, content, media_type = request
            headers = {"content-type": media_type} if media_type else {}
            return check_answer(path, http.post(server.address + path, content=content, headers=headers))

        def check(case: list[tuple[str, bytes, str]]) -> list[str]:
            return list(pool.map(ask, case))

        cases = st.lists(requests(routes), min_size=1, max_size=MAX_AT_ONCE)
        yield Target(name="bodies", cases=cases, check=check, settle=lambda: check_idle(server))
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
