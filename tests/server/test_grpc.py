"""The engine over gRPC: every call, errors as codes, cancels and deadlines that reach the engine, keys."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from fake_engine import BAD_TOKEN, FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxserve.errors import InvalidRequestError
from jaxserve.request import RequestOutput, SamplingParams, TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer
from server.config import ServerSection
from server.engine.async_engine import AsyncEngine
from server.engine.commands import Job
from server.grpc import engine_pb2 as pb
from server.grpc.engine_pb2_grpc import EngineStub
from server.grpc.errors import abort, end_call, error_of
from server.grpc.messages import from_params, from_response, to_params, to_request, to_response
from server.grpc.serve import SERVICE, make_server
from server.grpc.servicer import EngineService

FOREVER = 10**9
MAX_CALLS = 4
TIMEOUT_S = 20.0
KEY = "key-of-the-front-end"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    asyncio.run(bounded())


@asynccontextmanager
async def served(fake: FakeEngine, tokenizer: Tokenizer, **security: Any) -> AsyncIterator[grpc.aio.Channel]:
    engine = AsyncEngine(lambda _: fake)
    service = EngineService(engine, tokenizer, 2, MAX_CALLS)
    server, _ = make_server(service, ServerSection.model_validate({"security": security}))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine.start()
    await engine.wait_until_ready()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield channel
        finally:
            await server.stop(None)
            await engine.close()
            service.close()


def job(*ids: int, **params: Any) -> Any:
    return pb.Job(token_ids=pb.TokenIds(ids=ids), params=pb.SamplingParams(**params))


def embedded(**params: Any) -> Any:
    return pb.Job(token_ids=pb.TokenIds(ids=[5]), params=pb.SamplingParams(**params), pooling="mean")


async def all_of(stub: Any, request: Any) -> list[Any]:
    if isinstance(request, pb.EmbedRequest):
        return [await stub.Embed(request)]
    return [response async for response in stub.Generate(request)]


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# --- messages ---


def test_the_message_has_every_sampling_parameter_and_no_other() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == fields


def test_parameters_survive_the_journey() -> None:
    params = SamplingParams(
        n=3,
        max_tokens=7,
        min_tokens=2,
        temperature=0.1,
        top_k=-1,
        top_p=0.3,
        logit_bias={5: -1.5, 7: 100.0},
        allowed_token_ids=(5, 7),
        bad_words=("x",),
        bad_word_ids=((1, 2), (3,)),
        seed=-(2**63),
        stop=("a", "b"),
        stop_token_ids=(4,),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=20,
    )
    for case in (params, SamplingParams()):
        assert from_params(pb.SamplingParams.FromString(to_params(case).SerializeToString())) == case


def test_parameters_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_params(pb.SamplingParams(temperature=-1.0))
    assert caught.value.param == "temperature"


def test_outputs_survive_the_journey() -> None:
    entry = TokenLogprobs(token_id=5, logprob=-0.1, top=((5, -0.1), (7, -2.0)))
    output = RequestOutput(
        request_id="r-0",
        token_ids=(5,),
        logprobs=(entry,),
        prompt_logprobs=(None, entry),
        finish_reason="stop",
        stop_token_id=0,
        num_cached_tokens=16,
        queue_s=0.0,
    )
    params = SamplingParams(logprobs=2)
    for case in (output, RequestOutput(request_id="r-0", token_ids=(), logprobs=(), finish_reason="abort")):
        message = pb.GenerateResponse.FromString(to_response(3, case).SerializeToString())
        assert from_response(message, "r-0", params) == case


def test_a_request_grows_with_its_prompts_and_not_with_what_is_made_of_them() -> None:
    params = SamplingParams(n=128, logit_bias=dict.fromkeys(range(300), 1.0), stop=("x" * 1000,))
    prompts = [tuple(range(100 * i, 100 * i + 100)) for i in range(30)]

    def size(params: SamplingParams) -> int:
        jobs = [Job(prompt_token_ids=prompt, params=params) for prompt in prompts]
        return len(to_request("r", jobs).SerializeToString())

    once = len(to_params(params).SerializeToString())
    assert once > 4000
    assert size(params) - size(SamplingParams()) < once + 100


def test_jobs_with_parameters_of_their_own_keep_them() -> None:
    jobs = [Job(prompt_token_ids=(5,), params=SamplingParams(top_k=k)) for k in (1, 2, 1)]
    request = to_request("r", jobs)
    told = [job.params if job.HasField("params") else request.params for job in request.jobs]
    assert [from_params(message).top_k for message in told] == [1, 2, 1]


# --- calls ---


def test_generate_streams_each_steps_tokens_and_one_reason_a_sequence(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with served(FakeEngine(), tokenizer) as channel:
            request = pb.GenerateRequest(jobs=[job(500, 501, max_tokens=3), job(502, max_tokens=2, n=2)])
            responses = [response async for response in EngineStub(channel).Generate(request)]
            tokens: dict[int, list[int]] = {}
            for response in responses:
                tokens.setdefault(response.index, []).extend(response.token_ids)
            assert tokens == {0: [500, 501, 500], 1: [502, 502], 2: [502, 502]}
            assert sorted(r.index for r in responses if r.finish_reason == "length") == [0, 1, 2]
            assert not any(response.text for response in responses)

    run(scenario)


def test_generate_with_text_detokenizes_and_ends_at_stop_strings(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        fake = FakeEngine(max_model_len=2 * FOREVER)
        async with served(fake, tokenizer) as channel:
            params = pb.SamplingParams(max_tokens=FOREVER, stop=[" three"])
            request = pb.GenerateRequest(jobs=[pb.Job(text="one two three", params=params)], with_text=True)
            responses = [response async for response in EngineStub(channel).Generate(request)]
            assert "".join(response.text for response in responses) == "one two"
            assert (responses[-1].finish_reason, responses[-1].stop_string) == ("stop", " three")
            await wait_for(lambda: not fake.requests)

    run(scenario)


@pytest.mark.parametrize("method", sorted(method.name for method in pb.DESCRIPTOR.services_by_name["Engine"].methods))
def test_bytes_that_are_no_message_are_the_clients_fault(tokenizer: Tokenizer, method: str) -> None:
    async def scenario() -> None:
        async with served(FakeEngine(), tokenizer) as channel:
            path = f"/{SERVICE}/{method}"
            call: Any = channel.unary_stream(path) if method == "Generate" else channel.unary_unary(path)
            running = call(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError, match="the message cannot be read") as caught:
                await (running.read() if method == "Generate" else running)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    run(scenario)


def test_a_refusal_whose_client_has_left_is_no_fault_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        async def abort(self, *_: object, **__: object) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    async def scenario() -> None:
        for end in (abort(Gone(), InvalidRequestError("no")), end_call(Gone(), grpc.StatusCode.UNAUTHENTICATED, "no")):
            with pytest.raises(asyncio.CancelledError):
                await end

    run(scenario)
    assert not caplog.text


def test_an_error_that_repeats_a_long_text_still_fits_the_metadata(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with served(FakeEngine(), tokenizer) as channel:
            request = pb.EmbedRequest(jobs=[pb.Job(text="a", pooling="🙂" * 10_000)])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await EngineStub(channel).Embed(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert str(error_of(caught.value)).startswith("pooling is '🙂")

    run(scenario)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_call_that_ends_early_aborts_its_sequences(tokenizer: Tokenizer, how: str) -> None:
    async def scenario() -> None:
        fake = FakeEngine(max_model_len=2 * FOREVER)
        async with served(fake, tokenizer) as channel:
            request = pb.GenerateRequest(jobs=[job(500, max_tokens=FOREVER, n=3)])
            call = EngineStub(channel).Generate(request, timeout=0.3 if how == "deadline" else None)
            if how == "cancel":
                await call.read()
                call.cancel()
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await wait_for(lambda: not fake.requests)

    run(scenario)


def test_calls_beyond_the_limit_are_refused_but_neither_aborts_nor_probes(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        fake = FakeEngine(max_model_len=2 * FOREVER)
        async with served(fake, tokenizer) as channel:
            stub = EngineStub(channel)
            requests = [
                pb.GenerateRequest(request_id=f"r{i}", jobs=[job(500, max_tokens=FOREVER)]) for i in range(MAX_CALLS)
            ]
            calls = [stub.Generate(request) for request in requests]
            for call in calls:
                await call.read()
            for refused in (stub.Generate(pb.GenerateRequest(jobs=[job(5)])), stub.Tokenize(pb.TokenizeRequest())):
                with pytest.raises(grpc.aio.AioRpcError, match=r"4 calls are open .*max_connections") as caught:
                    await (refused.read() if hasattr(refused, "read") else refused)
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert (await stub.Health(pb.HealthRequest())).num_open == MAX_CALLS
            for i in range(MAX_CALLS):
                assert (await stub.Abort(pb.AbortRequest(request_id=f"r{i}"))).aborted == 1
            await wait_for(lambda: not fake.requests)
            assert (await stub.Tokenize(pb.TokenizeRequest(text="one"))).token_ids

    run(scenario)


def test_abort_ends_a_request_or_one_of_its_sequences(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with served(FakeEngine(max_model_len=2 * FOREVER), tokenizer) as channel:
            stub = EngineStub(channel)
            call = stub.Generate(pb.GenerateRequest(request_id="mine", jobs=[job(500, max_tokens=FOREVER, n=2)]))
            responses = aiter(call)
            await anext(responses)
            with pytest.raises(grpc.aio.AioRpcError, match="already in use"):
                await anext(aiter(stub.Generate(pb.GenerateRequest(request_id="mine", jobs=[job(5)]))))
            assert (await stub.Abort(pb.AbortRequest(request_id="mine", index=1))).aborted == 1
            reasons = []
            async for response in responses:
                if response.finish_reason:
                    reasons.append((response.index, response.finish_reason))
                    await stub.Abort(pb.AbortRequest(request_id="mine"))
            assert reasons == [(1, "abort"), (0, "abort")]
            assert (await stub.Abort(pb.AbortRequest(request_id="mine"))).aborted == 0

    run(scenario)


@pytest.mark.parametrize(
    ("request_", "code", "told"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "jobs"),
        (pb.GenerateRequest(jobs=[job()]), grpc.StatusCode.INVALID_ARGUMENT, "prompt is empty"),
        (pb.GenerateRequest(jobs=[job(10**6)]), grpc.StatusCode.INVALID_ARGUMENT, "1000000"),
        (pb.GenerateRequest(jobs=[job(5, top_p=2.0)]), grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        (pb.GenerateRequest(jobs=[job(5, n=128)] * 40), grpc.StatusCode.INVALID_ARGUMENT, "4096"),
        (pb.GenerateRequest(request_id="x" * 999, jobs=[job(5)]), grpc.StatusCode.INVALID_ARGUMENT, "999"),
        (pb.GenerateRequest(jobs=[pb.Job(text="a" * 10**6)]), grpc.StatusCode.INVALID_ARGUMENT, "max_model_len"),
        (pb.GenerateRequest(jobs=[job(BAD_TOKEN)]), grpc.StatusCode.INTERNAL, "not finite"),
        (pb.GenerateRequest(jobs=[embedded(max_tokens=5)]), grpc.StatusCode.INVALID_ARGUMENT, "embedding"),
        (pb.EmbedRequest(jobs=[embedded(n=2)]), grpc.StatusCode.INVALID_ARGUMENT, "embedding"),
    ],
    ids=range(10),
)
def test_errors_are_codes_with_the_engines_words(
    tokenizer: Tokenizer, request_: Any, code: grpc.StatusCode, told: str
) -> None:
    async def scenario() -> None:
        async with served(FakeEngine(), tokenizer) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await all_of(EngineStub(channel), request_)
            assert caught.value.code() == code
            assert told in caught.value.details()

    run(scenario)


def test_the_other_calls(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with served(FakeEngine(model_name="m"), tokenizer) as channel:
            stub = EngineStub(channel)
            ids = (await stub.Tokenize(pb.TokenizeRequest(text="one two"))).token_ids
            assert list(ids) == tokenizer.encode("one two")
            info = await stub.ModelInfo(pb.ModelInfoRequest())
            assert (info.name, info.max_model_len) == ("m", 64)
            health = await stub.Health(pb.HealthRequest())
            assert health.state == "ready"
            assert health.stats["pages_total"] == 8
            assert (await stub.Flush(pb.FlushRequest())).pages == 7

    run(scenario)


def test_health_and_reflection_are_the_standard_ones(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with served(FakeEngine(), tokenizer) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            async for listed in stub.ServerReflectionInfo(iter([asked])):
                assert SERVICE in {service.name for service in listed.list_services_response.service}

    run(scenario)


def test_keys_are_asked_for_where_there_are_any_but_not_by_probes(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSERVE_API_KEYS", f"front:{KEY}")

    async def scenario() -> None:
        async with served(FakeEngine(), tokenizer) as channel:
            stub = EngineStub(channel)
            request = pb.GenerateRequest(jobs=[job(500, max_tokens=2)])
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", KEY),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Health(pb.HealthRequest(), metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.Generate(request, metadata=metadata):
                        pass
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            good = (("authorization", f"Bearer {KEY}"),)
            assert len([r async for r in stub.Generate(request, metadata=good)]) == 2
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    run(scenario)
