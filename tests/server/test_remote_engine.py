"""RemoteEngine against a real gRPC server in the same loop: keys, TLS, and what a front end asks for."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
import trustme
from fake_engine import FAKE_MODEL, FakeEngine

from jaxserve.errors import InvalidRequestError
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from server.config import SecuritySection, ServerSection
from server.dashboard.feed import Feed, Viewer
from server.engine.async_engine import AsyncEngine
from server.engine.commands import Job
from server.engine.engine_client import UnavailableError
from server.errors import RemoteError
from server.grpc.channel import open_channel
from server.grpc.errors import error_of
from server.grpc.remote_engine import RemoteEngine
from server.grpc.serve import listen, make_server
from server.grpc.servicer import EngineService
from server.observability.metrics import Metrics

FOREVER = 10**9
TIMEOUT_S = 20.0
KEY = "key-of-the-front-end"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    asyncio.run(bounded())


@asynccontextmanager
async def remote(
    fake: FakeEngine,
    tokenizer: Tokenizer,
    *,
    security: SecuritySection | None = None,
    authority: str | None = None,
    own: SecuritySection | None = None,
    key: str | None = None,
    max_body_bytes: int = 2**24,
) -> AsyncIterator[RemoteEngine]:
    engine = AsyncEngine(lambda _: fake)
    service = EngineService(engine, tokenizer, 1, 1024)
    settings = ServerSection(
        grpc_listen="127.0.0.1:0", security=security or SecuritySection(), max_body_bytes=max_body_bytes
    )
    server, _ = make_server(service, settings)
    address = await listen(server, settings)
    engine.start()
    await engine.wait_until_ready()
    client = RemoteEngine(partial(open_channel, address, authority, own or SecuritySection()), FAKE_MODEL, key=key)
    client.start()
    try:
        yield client
    finally:
        await client.close()
        await server.stop(None)
        await engine.close()
        service.close()


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def job(*prompt: int, max_tokens: int = 4) -> Job:
    return Job(prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens))


def test_jobs_run_elsewhere_as_they_would_here(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        fake = FakeEngine()
        async with remote(fake, tokenizer) as engine:
            limits = await engine.wait_until_ready()
            assert (limits.model_name, limits.max_model_len, limits.model_config) == ("fake", 64, FAKE_MODEL)
            with pytest.raises(InvalidRequestError, match="empty"):
                engine.submit("bad", [job(5), job()])
            with engine.submit("r", [job(5, 6), job(7, max_tokens=2)]) as generation:
                items = [item async for item in generation]
            tokens = {index: [t for i, o in items if i == index for t in o.token_ids] for index in (0, 1)}
            assert tokens == {0: [5, 6, 5, 6], 1: [7, 7]}
            assert engine.num_open == 0
            await wait_for(lambda: engine.stats is not None and engine.stats.pages_total == 8)
            assert await engine.flush() == 7
            pages = await engine.pages()
            assert (pages["fault"], pages["pages_total"], pages["ledger"]["total"]) == (None, 8, 8)
            with pytest.raises(UnavailableError, match="apart"):
                await engine.call(lambda _: None)

    run(scenario)


def test_one_sequence_is_aborted_and_its_neighbour_goes_on(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        fake = FakeEngine(max_model_len=FOREVER, step_s=0.005)
        async with remote(fake, tokenizer) as engine:
            await engine.wait_until_ready()
            with engine.submit("r", [job(5, max_tokens=10**8), job(6, max_tokens=80)]) as generation:
                await anext(generation)
                generation.abort(0)
                seen = [item async for item in generation]
            assert {index for index, _ in seen} == {1}
            assert seen[-1][1].finish_reason == "length"
            await wait_for(lambda: not fake.requests)
            with engine.submit("s", [job(5, max_tokens=10**8), job(6, max_tokens=10**8)]) as generation:
                await anext(generation)
                assert engine.cancel("s") == 2
                reasons = [o.finish_reason async for _, o in generation if o.finish_reason]
            assert reasons == ["abort", "abort"]
            assert engine.cancel("s") == 0

    run(scenario)


def test_a_prompt_is_sent_once_however_many_choices_it_has(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        fake = FakeEngine(max_model_len=FOREVER)
        async with remote(fake, tokenizer, max_body_bytes=4096) as engine:
            await engine.wait_until_ready()
            prompt, other = tuple(range(2000)), (7, 8)
            params = SamplingParams(n=64, max_tokens=3, logit_bias=dict.fromkeys(range(300), 1.0))
            jobs = [Job(prompt_token_ids=tokens, params=params) for tokens in (prompt, other)]
            with engine.submit("r", jobs) as generation:
                assert engine.num_open == 128
                tokens: dict[int, list[int]] = {}
                async for index, output in generation:
                    tokens.setdefault(index, []).extend(output.token_ids)
            assert tokens == {i: [0, 1, 2] if i < 64 else [7, 8, 7] for i in range(128)}
            assert engine.num_open == 0

    run(scenario)


def test_a_client_that_leaves_ends_all_its_sequences_with_one_call(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    monkeypatch.setattr(RemoteEngine, "_send_abort", lambda _, request: sent.append(request))

    async def scenario() -> None:
        fake = FakeEngine(max_model_len=FOREVER)
        async with remote(fake, tokenizer) as engine:
            await engine.wait_until_ready()
            params = SamplingParams(n=100, max_tokens=10**8)
            with engine.submit("r", [Job(prompt_token_ids=(5,), params=params)]) as generation:
                await anext(generation)
            await wait_for(lambda: not fake.requests)
            assert engine.num_open == 0

    run(scenario)
    assert not sent


def test_what_the_engine_has_no_room_for_is_told_with_its_keys(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with remote(FakeEngine(max_model_len=FOREVER), tokenizer, max_body_bytes=100) as engine:
            await engine.wait_until_ready()
            with (
                engine.submit("r", [job(*range(2000))]) as generation,
                pytest.raises(UnavailableError, match=r"server\.max_body_bytes"),
            ):
                await anext(generation)

    run(scenario)


def test_a_refusal_that_only_the_engine_can_make_arrives_as_it_was(tokenizer: Tokenizer) -> None:
    class Moody(FakeEngine):
        def queue(self, *_: object, **__: object) -> None:
            raise InvalidRequestError("not today", param="prompt", code="moody")

    async def scenario() -> None:
        async with remote(Moody(), tokenizer) as engine:
            await engine.wait_until_ready()
            with engine.submit("r", [job(5)]) as generation, pytest.raises(RemoteError) as caught:
                await anext(generation)
            reply = caught.value.reply
            assert (reply.status, reply.message, reply.param, reply.code) == (400, "not today", "prompt", "moody")

    run(scenario)


@pytest.mark.parametrize(
    "detail", [b"", b"{", b"[]", b'{"status": 400}', b'{"status": 999, "message": "", "kind": ""}']
)
def test_an_error_that_cannot_be_read_is_an_engine_that_cannot_be_reached(detail: bytes) -> None:
    trailing = grpc.aio.Metadata(("jaxserve-error-bin", detail))
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), trailing, details="no")
    assert isinstance(error_of(error), UnavailableError)


def test_an_answer_that_no_engine_gives_ends_the_request_and_leaves_nothing_open(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(FakeEngine):
        def step(self) -> list[RequestOutput]:
            return [replace(output, finish_reason="whim") for output in super().step()]

    async def scenario() -> None:
        async with remote(Odd(), tokenizer) as engine:
            await engine.wait_until_ready()
            with engine.submit("r", [job(5)]) as generation, pytest.raises(UnavailableError, match="not understood"):
                await anext(generation)
            await wait_for(lambda: engine.num_open == 0)
            assert "whim" in caplog.text

    run(scenario)


def test_the_engines_key_opens_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"front:{KEY}\n")
    security = SecuritySection(api_keys_file=str(keys))

    async def scenario(key: str | None, state: str) -> None:
        async with remote(FakeEngine(), tokenizer, security=security, key=key) as engine:
            await wait_for(lambda: engine.state == state)

    run(partial(scenario, KEY, "ready"))
    run(partial(scenario, "wrong-key", "unreachable"))
    run(partial(scenario, None, "unreachable"))


def test_mutual_tls_between_front_end_and_engine(tokenizer: Tokenizer, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = {}
    for name, pem in (
        ("ca", authority.cert_pem),
        ("engine", authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem),
        ("front", authority.issue_cert("front@example.org").private_key_and_cert_chain_pem),
        ("stranger", stranger.issue_cert("stranger@example.org").private_key_and_cert_chain_pem),
    ):
        pem.write_to_path(str(tmp_path / f"{name}.pem"))
        files[name] = str(tmp_path / f"{name}.pem")
    security = SecuritySection(tls_certificate=files["engine"], tls_key=files["engine"], tls_client_ca=files["ca"])

    async def scenario(shown: str | None, state: str) -> None:
        own = None if shown is None else SecuritySection(tls_certificate=files[shown], tls_key=files[shown])
        async with remote(FakeEngine(), tokenizer, security=security, authority=files["ca"], own=own) as engine:
            await wait_for(lambda: engine.state == state)

    run(partial(scenario, "front", "ready"))
    run(partial(scenario, "stranger", "unreachable"))
    run(partial(scenario, None, "unreachable"))


def test_an_address_in_use_is_told_with_its_key(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(lambda _: FakeEngine())
        service = EngineService(engine, tokenizer, 1, 1024)
        first, _ = make_server(service, ServerSection())
        address = await listen(first, ServerSection(grpc_listen="127.0.0.1:0"))
        taken = ServerSection(grpc_listen=address)
        second, _ = make_server(service, taken)
        with pytest.raises(Exception, match=r"server\.grpc_listen"):
            await listen(second, taken)
        await first.stop(None)
        service.close()

    run(scenario)


def test_the_live_page_has_the_counts_and_says_what_it_cannot_show(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with remote(FakeEngine(), tokenizer) as engine:
            await engine.wait_until_ready()
            viewer = Viewer()
            with Feed(engine, Metrics(engine)).watched_by(viewer):
                event = json.loads((await anext(viewer.events())).removeprefix(b"data: "))
            assert (event["state"], event["picture"]) == ("ready", None)
            assert "runs apart from its engine" in event["notice"]
            assert event["stats"]["pages_total"] == 8

    run(scenario)
