"""Fuzzes gRPC: spoiled messages, raw bytes, cancels and deadlines on every method of a running engine."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from hypothesis import strategies as st

from server.grpc import engine_pb2 as pb
from tests.fuzz.bodies import MAX_AT_ONCE, SETTINGS, SETTLE_S, TIME_S
from tests.fuzz.mutate import Draw, edited_bytes, edited_json
from tests.fuzz.target import Target
from tests.live_process import Running, engine_process, write_tiny_model

SERVICE = pb.DESCRIPTOR.services_by_name["Engine"]
_PARAMS: dict[str, Any] = {
    "maxTokens": 6, "minTokens": 1, "temperature": 0.7, "topK": 5, "topP": 0.9, "minP": 0.01, "seed": 7, "n": 2,
    "logitBias": {"5": 10.0, "6": -100.0}, "stop": ["e"], "stopTokenIds": [9], "logprobs": 2, "promptLogprobs": 1,
    "badWords": ["the"], "badWordIds": [{"ids": [4, 5]}], "allowedTokenIds": [7, 8], "priority": 1, "tenant": "a",
    "cacheSalt": "s", "deadlineMs": 5000, "queueTimeoutMs": 5000, "repetitionPenalty": 1.1, "presencePenalty": 0.5,
}  # fmt: skip
_JOBS = [{"tokenIds": {"ids": [1, 2, 3]}, "params": _PARAMS}, {"text": "a river 🙂", "params": {"maxTokens": 4}}]
MESSAGES: dict[str, tuple[dict[str, Any], ...]] = {
    "Generate": (
        {"requestId": "x", "jobs": _JOBS, "withText": True},
        {"jobs": [{"tokenIds": {"ids": [1, 2, 3]}, "params": {"maxTokens": 3, "n": 3}}]},
        {"jobs": [{"tokenIds": {"ids": [1]}}, {"tokenIds": {"ids": [2, 3]}}], "params": {"maxTokens": 3, "n": 2}},
        {"jobs": [{"tokenIds": {"ids": [1, 2]}, "params": {"tenant": "a"}, "pooling": "mean"}]},
    ),
    "Embed": ({"jobs": [{"text": "a river", "pooling": "mean"}, {"tokenIds": {"ids": [1]}, "pooling": "last"}]},),
    "Tokenize": ({"text": "a river", "addSpecialTokens": True},),
    "Abort": ({"requestId": "x", "index": 0},),
    "ModelInfo": ({},),
    "Flush": ({},),
    "Pages": ({},),
    "Health": ({},),
}
# What a client may be told; INTERNAL, UNKNOWN and the like are faults of the server.
ANSWERS = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")


@st.composite
def calls(draw: Draw) -> tuple[str, bytes, int, float]:
    """A method, its request as bytes, after how many responses the client leaves, and its deadline in seconds."""
    method = draw(st.sampled_from(sorted(MESSAGES)))
    described = draw(st.sampled_from(MESSAGES[method]))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        raw = draw(st.binary(max_size=100))
    elif kind <= 3:
        raw = draw(edited_bytes(_message(method, described) or b""))
    else:
        raw = draw(edited_json(described, names=sorted(_PARAMS)).map(lambda value: _message(method, value)))
        raw = raw if raw is not None else draw(edited_bytes(_message(method, described) or b""))
    leaves_after = draw(st.sampled_from((1000, 1000, 1000, 1000, 0, 1, 3)))
    deadline_s = draw(st.sampled_from((TIME_S, TIME_S, TIME_S, 0.001, 0.05)))
    return method, raw, leaves_after, deadline_s


def _message(method: str, described: Any) -> bytes | None:
    """Serialized; None for what no message of the method's type can hold."""
    message = getattr(pb, f"{method}Request")()
    try:
        json_format.ParseDict(described, message, ignore_unknown_fields=True)
        raw: bytes = message.SerializeToString()
    except Exception:  # ParseError, and whatever else it makes of what is no message at all
        return None
    return raw


@contextmanager
def message_target(folder: Path) -> Iterator[Target]:
    """`folder`: scratch space."""
    model = write_tiny_model(folder)
    settings = [setting for setting in SETTINGS if "chat_template" not in setting]
    with engine_process(model, settings, folder / "engine.log") as engine:
        with grpc.insecure_channel(engine.address) as channel, ThreadPoolExecutor(MAX_AT_ONCE) as pool:

            def check(case: list[tuple[str, bytes, int, float]]) -> list[str]:
                return list(pool.map(lambda one: call(channel, *one), case))

            yield Target(
                name="messages",
                cases=st.lists(calls(), min_size=1, max_size=MAX_AT_ONCE),
                check=check,
                settle=lambda: check_idle(engine, channel),
            )
        engine.stop()


def call(channel: grpc.Channel, method: str, raw: bytes, leaves_after: int, deadline_s: float) -> str:
    """Raises unless the call ends as a client may be told; returns how."""
    path = f"/{SERVICE.full_name}/{method}"
    answers: list[bytes] = []
    running: Any = None
    try:
        if method == "Generate":
            running = channel.unary_stream(path)(raw, timeout=deadline_s)
            for answer in running:
                answers.append(answer)
                if len(answers) >= leaves_after:
                    running.cancel()
                    return "left"
            check_stream(raw, answers)
        else:
            answers.append(channel.unary_unary(path)(raw, timeout=deadline_s))
            getattr(pb, f"{method}Response").FromString(answers[0])
    except grpc.RpcError as error:
        return check_code(method, error, deadline_s)
    return "OK"


def check_code(method: str, error: Any, deadline_s: float) -> str:
    code: str = error.code().name
    assert code in ANSWERS, f"{method} ended with {code}: {error.details()}"
    # A request may carry a deadline of its own, but only Generate looks at it.
    late = code == "DEADLINE_EXCEEDED" and deadline_s == TIME_S and method != "Generate"
    assert not late, f"{method} took more than {deadline_s} s"
    return code


def check_stream(raw: bytes, answers: list[bytes]) -> None:
    """Raises unless every sequence of a whole stream has one finish reason."""
    request = pb.GenerateRequest.FromString(raw)
    responses = [pb.GenerateResponse.FromString(answer) for answer in answers]
    finished = Counter(response.index for response in responses if response.finish_reason)
    told = [job.params if job.HasField("params") else request.params for job in request.jobs]
    sequences = sum(params.n if params.HasField("n") else 1 for params in told)
    assert finished == Counter(range(sequences)), f"{sequences} sequences, finish reasons {finished}"


def check_idle(engine: Running, channel: grpc.Channel) -> None:
    """Raises unless the engine is well, and soon nothing of what ran is left in it."""
    deadline = time.monotonic() + SETTLE_S
    health = channel.unary_unary(f"/{SERVICE.full_name}/Health")
    while True:
        engine.check_alive()
        state = pb.HealthResponse.FromString(health(b"", timeout=TIME_S))
        if not (state.num_open or state.stats["num_running"] or state.stats["num_waiting"]):
            break
        assert time.monotonic() < deadline, f"{state.num_open} open: {state.stats}"
        time.sleep(0.05)
    assert state.state == "ready", state.state
    assert state.stats["pages_active"] == 0, state.stats
    assert state.stats["pages_free"] + state.stats["pages_cached"] == state.stats["pages_total"], state.stats
    assert state.stats["compilations_after_ready"] == 0, state.stats
