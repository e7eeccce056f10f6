"""Fuzzes what reads streams: the conformance reader, the load generator's, and a front end's of its engine."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from jaxserve.errors import JaxserveError
from jaxserve.request import SamplingParams
from models.config import ModelConfig
from server.bench.reply import ReplyReader
from server.config import SecuritySection
from server.conformance.case import FailedError
from server.conformance.client import read_events
from server.engine.commands import Job
from server.grpc import engine_pb2 as pb
from server.grpc.channel import open_channel
from server.grpc.remote_engine import RemoteEngine
from tests.fuzz.mutate import Draw, edited_bytes, edited_json, json_text
from tests.fuzz.target import Target

TIME_S = 60.0  # a machine that others measure on stops processes for as long
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=128,
)
CHUNKS: tuple[dict[str, Any], ...] = (
    {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
    {"choices": [{"index": 0, "delta": {"content": "a 🙂"}, "logprobs": {"content": [{"token": "a"}]}}]},
    {"choices": [{"index": 0, "text": "b", "token_ids": [5, 6], "finish_reason": None}], "usage": None},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}},
    },
    {"error": {"message": "it broke", "type": "server_error"}},
)
_PARAMS = SamplingParams(max_tokens=4, logprobs=1)
_JOBS = [Job(prompt_token_ids=(1, 2), params=_PARAMS), Job(prompt_token_ids=(3,), params=_PARAMS)]
RESPONSES = (
    pb.GenerateResponse(index=0, token_ids=[5], logprobs=[pb.TokenLogprobs(token_id=5, top_ids=[5], top=[0.0])]),
    pb.GenerateResponse(index=1, token_ids=[6], logprobs=[pb.TokenLogprobs(token_id=6)], num_cached_tokens=1),
    pb.GenerateResponse(index=0, finish_reason="stop", stop_token_id=5, queue_s=0.1),
    pb.GenerateResponse(index=1, finish_reason="length"),
)
_HEALTH = pb.HealthResponse(state="ready", stats={"num_running": 1.0})
_INFO = pb.ModelInfoResponse(
    name="tiny",
    max_model_len=64,
    num_token_ids=100,
    eos_token_ids=[2],
    config_json=EngineConfig.model_validate(
        {"model": {"path": "x", "name": "tiny", "max_model_len": 64}, "cache": {"num_pages": 65, "page_size": 16}}
    ).model_dump_json(),
)


@st.composite
def event_streams(draw: Draw) -> tuple[bytes, list[int]]:
    """The bytes of a stream of events, and where it is cut into pieces."""
    chunks = list(draw(st.lists(st.sampled_from(CHUNKS), max_size=6)))
    if chunks and draw(st.booleans()):
        at = draw(st.integers(0, len(chunks) - 1))
        chunks[at] = draw(edited_json(chunks[at]))
    end = draw(st.sampled_from(("\n\n", "\n\n", "\r\n\r\n", "\r\r", "\n")))
    begin = draw(
        st.sampled_from(("data: ", "data: ", "data:", "event: x\ndata: ", ": hello\n\ndata: ", "data: \ndata: "))
    )
    raw = "".join(f"{begin}{json_text(chunk)}{end}" for chunk in chunks).encode()
    raw += draw(
        st.sampled_from(
            (b"data: [DONE]\n\n", b"data: [DONE]\n\n", b"data: [DONE]", b"", b"data: [DONE]\n\ndata: {}\n\n")
        )
    )
    if draw(st.integers(0, 2)) == 0:
        raw = draw(edited_bytes(raw))
    return raw, sorted(draw(st.lists(st.integers(0, len(raw)), max_size=8)))


@st.composite
def engine_scripts(draw: Draw) -> tuple[list[bytes], bytes | None]:
    """What an engine answers to Generate, message by message, and the error's details that end it, if any."""
    raw = [response.SerializeToString() for response in draw(st.permutations(RESPONSES))]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(raw) - 1))
        action = draw(st.sampled_from(("edit", "index", "reason", "drop", "repeat")))
        if action == "edit":
            raw[at] = draw(edited_bytes(raw[at]))
        elif action == "index":
            raw[at] = pb.GenerateResponse(
                index=draw(st.sampled_from((-1, 2, 2**31 - 1))), token_ids=[1]
            ).SerializeToString()
        elif action == "reason":
            raw[at] = pb.GenerateResponse(finish_reason=draw(st.sampled_from(("", "?", "error")))).SerializeToString()
        elif action == "drop" and len(raw) > 1:
            del raw[at]
        else:
            raw.insert(at, raw[at])
    detail = {"status": 400, "message": "no", "kind": "invalid_request_error", "param": None, "code": None}
    spoiled = edited_json(detail).map(lambda value: json_text(value).encode())
    return raw, draw(st.none() | st.just(json.dumps(detail).encode()) | spoiled | st.binary(max_size=20))


Case = tuple[str, Any]


@contextmanager
def stream_target(_: Path) -> Iterator[Target]:
    with _loop_on_a_thread() as do, _HostileEngine(do) as engine:

        def check(case: Case) -> list[str]:
            kind, content = case
            if kind == "engine":
                return [f"engine: {do(engine.generate(*content))}"]
            raw, cuts = content
            return [f"conformance: {read_strictly(raw)}", f"bench: {read_in_pieces(raw, cuts)}"]

        cases = st.tuples(st.just("events"), event_streams()) | st.tuples(st.just("engine"), engine_scripts())
        yield Target(name="streams", cases=cases, check=check, settle=lambda: do(engine.check_idle()))


def read_strictly(raw: bytes) -> str:
    try:
        chunks = read_events(raw)
    except (FailedError, UnicodeDecodeError) as error:
        return type(error).__name__
    assert isinstance(chunks, list)
    return "read"


def read_in_pieces(raw: bytes, cuts: list[int]) -> str:
    """Raises unless the pieces of a stream read as the whole does."""
    results = []
    for places in ([], cuts):
        reader = ReplyReader()
        for start, end in zip([0, *places], [*places, len(raw)], strict=True):
            reader.feed(raw[start:end], 1.0)
        reader.close(1.0)
        tokens = reader.tokens()
        assert tokens.output_tokens >= 0, tokens
        assert reader.is_over or reader.failure is not None or reader.finish_reason is not None
        results.append((tokens, reader.failure, reader.detail, reader.content, reader.oddities))
    assert results[0] == results[1], results
    return str(results[0][1] or "read")


class _HostileEngine:
    """A gRPC server that answers Generate as it is told, and a front end that listens to it."""

    def __init__(self, do: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._do = do
        self._script: tuple[list[bytes], bytes | None] = ([], None)
        self._count = 0

    def __enter__(self) -> "_HostileEngine":
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())

    async def _start(self) -> None:
        def unary(answer: Any) -> Any:
            async def call(request: bytes, context: Any) -> bytes:
                raw: bytes = answer.SerializeToString()
                return raw

            return grpc.unary_unary_rpc_method_handler(call)

        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
            "Health": unary(_HEALTH),
            "ModelInfo": unary(_INFO),
            "Abort": unary(pb.AbortResponse(aborted=1)),
        }
        self._server = grpc.aio.server()
        service = pb.DESCRIPTOR.services_by_name["Engine"].full_name
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._client = RemoteEngine(partial(open_channel, f"127.0.0.1:{port}", None, SecuritySection()), MODEL)
        self._client.start()
        await asyncio.wait_for(self._client.wait_until_ready(), TIME_S)

    async def _stop(self) -> None:
        await self._client.close()
        await self._server.stop(None)

    async def _generate(self, _: bytes, context: Any) -> AsyncIterator[bytes]:
        messages, detail = self._script
        for message in messages:
            yield message
        if detail is not None:
            trailing = (("jaxserve-error-bin", detail),)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no", trailing_metadata=trailing)

    async def generate(self, messages: list[bytes], detail: bytes | None) -> str:
        """Raises unless the sequences end, each once, or an error of ours says why not."""
        self._script = (messages, detail)
        self._count += 1
        ended: list[int] = []
        async with asyncio.timeout(TIME_S):
            try:
                with self._client.submit(f"x{self._count}", _JOBS) as generation:
                    async for index, output in generation:
                        if output.finish_reason is not None:
                            ended.append(index)
            except JaxserveError as error:
                str(error).encode()
                return type(error).__name__
            finally:
                while self._client.num_open:
                    await asyncio.sleep(0)
        assert sorted(ended) == [0, 1], ended
        return "read"

    async def check_idle(self) -> None:
        assert self._client.num_open == 0
        assert self._client.state == "ready", self._client.state


@contextmanager
def _loop_on_a_thread() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="streams")
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
