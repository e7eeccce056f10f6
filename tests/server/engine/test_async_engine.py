"""The engine's thread: one reply a request, whatever happens to the request, its client or the engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from fake_engine import FakeEngine

from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError, RequestFailedError
from jaxserve.request import RequestOutput, SamplingParams, TokenLogprobs
from server.engine.async_engine import AsyncEngine
from server.engine.commands import Job
from server.engine.engine_client import Generation, UnavailableError

TIMEOUT_S = 20.0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    asyncio.run(bounded())


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[AsyncEngine]:
    async_engine = AsyncEngine(lambda progress: engine)
    async_engine.start()
    await async_engine.wait_until_ready()
    try:
        yield async_engine
    finally:
        engine.may_step.set()
        await async_engine.close()


def job(*prompt: int, max_tokens: int | None = 4) -> Job:
    return Job(prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens))


async def collect(generation: Generation) -> list[tuple[int, RequestOutput]]:
    with generation:
        return [item async for item in generation]


def tokens_of(items: list[tuple[int, RequestOutput]], index: int) -> list[int]:
    return [token_id for i, output in items if i == index for token_id in output.token_ids]


def test_each_job_of_a_submission_gets_its_own_tokens_and_one_finish_reason() -> None:
    async def scenario() -> None:
        async with running(FakeEngine()) as engine:
            items = await collect(engine.submit("r", [job(5, 6), job(7, max_tokens=2)]))
            assert tokens_of(items, 0) == [5, 6, 5, 6]
            assert tokens_of(items, 1) == [7, 7]
            assert [i for i, output in items if output.finish_reason is not None] == [1, 0]

    run(scenario)


def test_an_id_is_free_again_when_the_engine_has_ended_all_its_jobs() -> None:
    async def scenario() -> None:
        fake = FakeEngine()
        async with running(fake) as engine:
            with engine.submit("r", [job(5, max_tokens=1), job(6, max_tokens=None)]) as generation:
                while (await anext(generation))[1].finish_reason is None:
                    pass
                with pytest.raises(InvalidRequestError, match="already in use"):  # job 1 still runs
                    engine.submit("r", [job(7), job(7)])
                fake.may_step.clear()
            with pytest.raises(InvalidRequestError, match="already in use"):  # the engine has yet to hear of its end
                engine.submit("r", [job(7)])
            fake.may_step.set()
            while True:
                try:
                    again = engine.submit("r", [job(7, 8, max_tokens=2)])
                    break
                except InvalidRequestError:
                    await asyncio.sleep(0.001)
            assert tokens_of(await collect(again), 0) == [7, 8]

    run(scenario)


def test_only_the_engine_thread_touches_the_engine() -> None:
    async def scenario() -> None:
        fake = FakeEngine()
        async with running(fake) as engine:
            await collect(engine.submit("r", [job(5)]))
        assert fake.threads == {"engine"}

    run(scenario)


def test_a_bad_job_is_refused_before_any_job_beside_it_is_queued() -> None:
    async def scenario() -> None:
        fake = FakeEngine()
        async with running(fake) as engine:
            with pytest.raises(InvalidRequestError, match="empty"):
                engine.submit("r", [job(5), job()])
            await collect(engine.submit("good", [job(5)]))
        assert [call for call in fake.calls if call.startswith("add")] == ["add good-0"]

    run(scenario)


def test_a_job_that_the_engine_itself_refuses_still_gets_its_one_reply() -> None:
    class Moody(FakeEngine):
        def queue(self, *_: object, **__: object) -> None:
            raise InvalidRequestError("not today", param="prompt")

    async def scenario() -> None:
        async with running(Moody()) as engine:
            with pytest.raises(InvalidRequestError, match="not today"):
                await collect(engine.submit("r", [job(5)]))
            await engine.drain(TIMEOUT_S)  # nothing is left open

    run(scenario)


def test_an_aborted_job_yields_nothing_more_and_its_neighbour_goes_on() -> None:
    async def scenario() -> None:
        fake = FakeEngine(max_model_len=10**9)
        async with running(fake) as engine:
            with engine.submit("r", [job(5, max_tokens=None), job(6)]) as generation:
                seen = []
                async for index, output in generation:
                    seen.append((index, output))
                    generation.abort(0)
            assert len([i for i, _ in seen if i == 0]) <= 1
            assert tokens_of(seen, 1) == [6, 6, 6, 6]
            while "abort r-0" not in fake.calls:
                await asyncio.sleep(0.001)
            assert "abort r-1" not in fake.calls

    run(scenario)


def test_leaving_a_generation_aborts_what_still_runs() -> None:
    async def scenario() -> None:
        fake = FakeEngine(max_model_len=10**6)
        async with running(fake) as engine:
            with engine.submit("r", [job(5, max_tokens=None), job(6, max_tokens=None)]) as generation:
                await anext(generation)
            while fake.requests:
                await asyncio.sleep(0.001)
            assert {"abort r-0", "abort r-1"} <= set(fake.calls)

    run(scenario)


def test_an_idle_engine_makes_no_steps_and_wakes_for_the_next_request() -> None:
    async def scenario() -> None:
        fake = FakeEngine()
        async with running(fake) as engine:
            await collect(engine.submit("first", [job(5)]))
            steps = fake.num_steps
            await asyncio.sleep(0.05)
            assert fake.num_steps == steps == 4
            await collect(engine.submit("second", [job(5)]))
            assert fake.num_steps == 8

    run(scenario)


def test_one_step_wakes_the_event_loop_once_for_all_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        fake = FakeEngine()
        fake.may_step.clear()
        async with running(fake) as engine:
            generation = engine.submit("r", [job(token_id) for token_id in range(1, 9)])
            loop = asyncio.get_running_loop()
            wakes: list[object] = []
            original = loop.call_soon_threadsafe
            monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a, **k: (wakes.append(a), original(*a, **k))[1])
            fake.may_step.set()
            items = await collect(generation)
            assert len(items) == 32
            assert len(wakes) == fake.num_steps == 4

    run(scenario)


def test_death_of_the_engine_ends_every_open_and_later_request() -> None:
    async def scenario() -> None:
        fake = FakeEngine(die_at_step=3)
        async with running(fake) as engine:
            open_generations = [engine.submit(f"r{i}", [job(5, max_tokens=None), job(6)]) for i in range(3)]
            for generation in open_generations:
                with pytest.raises(EngineDeadError, match="RuntimeError"):
                    await collect(generation)
            assert engine.state == "dead"
            with pytest.raises(EngineDeadError, match="RuntimeError"):
                engine.submit("late", [job(5)])

    run(scenario)


def test_requests_while_loading_are_refused_and_progress_is_seen() -> None:
    async def scenario() -> None:
        may_finish = threading.Event()

        def load(progress: Callable[[str, int, int], None]) -> FakeEngine:
            progress("compile", 1, 3)
            may_finish.wait()
            return FakeEngine()

        engine = AsyncEngine(load)
        engine.start()
        while engine.progress is None:
            await asyncio.sleep(0.001)
        assert (engine.progress.phase, engine.progress.done, engine.progress.total) == ("compile", 1, 3)
        with pytest.raises(UnavailableError, match="loading"):
            engine.submit("r", [job(5)])
        may_finish.set()
        await engine.wait_until_ready()
        await collect(engine.submit("r", [job(5)]))
        await engine.close()

    run(scenario)


def test_a_failed_load_keeps_its_cause() -> None:
    async def scenario() -> None:
        def load(progress: Callable[[str, int, int], None]) -> FakeEngine:
            raise ConfigError("not enough memory")

        engine = AsyncEngine(load)
        engine.start()
        with pytest.raises(EngineDeadError):
            await engine.wait_until_ready()
        assert isinstance(engine.failure, ConfigError)
        await engine.close()
        assert engine.state == "dead"

    run(scenario)


def test_closing_while_loading_stops_at_the_next_report_of_progress() -> None:
    async def scenario() -> None:
        reported = 0

        def load(progress: Callable[[str, int, int], None]) -> FakeEngine:
            nonlocal reported
            while True:
                progress("compile", reported, 10**9)
                reported += 1

        engine = AsyncEngine(load)
        engine.start()
        while engine.progress is None:
            await asyncio.sleep(0.001)
        await engine.close()
        assert engine.state == "stopped"
        with pytest.raises(UnavailableError):
            await engine.wait_until_ready()

    run(scenario)


def test_draining_lets_requests_end_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        fake = FakeEngine()
        fake.may_step.clear()
        async with running(fake) as engine:
            collecting = asyncio.create_task(collect(engine.submit("r", [job(5)])))
            draining = asyncio.create_task(engine.drain(TIMEOUT_S))
            await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError, match="shutting down"):
                engine.submit("late", [job(5)])
            fake.may_step.set()
            await draining
            assert (await collecting)[-1][1].finish_reason == "length"

    run(scenario)


def test_a_drain_that_takes_too_long_ends_requests_with_reason_abort() -> None:
    async def scenario() -> None:
        async with running(FakeEngine(max_model_len=10**9)) as engine:
            collecting = asyncio.create_task(collect(engine.submit("r", [job(5, max_tokens=None), job(6)])))
            while engine.num_open != 1:  # job 1 has ended
                await asyncio.sleep(0.001)
            await engine.drain(0.02)
            items = await collecting
            reasons = {i: output.finish_reason for i, output in items if output.finish_reason is not None}
            assert reasons == {0: "abort", 1: "length"}

    run(scenario)


def test_a_hanging_engine_is_given_up_and_its_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.async_engine.ABORT_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        fake = FakeEngine()
        fake.may_step.clear()
        async with running(fake) as engine:
            collecting = asyncio.create_task(collect(engine.submit("r", [job(5)])))
            await asyncio.sleep(0.01)
            await engine.drain(0.0)
            with pytest.raises(EngineDeadError, match="given up"):
                await collecting

    run(scenario)


def test_outputs_that_wait_for_a_busy_consumer_come_as_one() -> None:
    async def scenario() -> None:
        async with running(FakeEngine()) as engine:
            params = SamplingParams(max_tokens=40, logprobs=0)
            with engine.submit("r", [Job(prompt_token_ids=(5, 6, 7), params=params)]) as generation:
                items = [await anext(generation)]
                while engine.num_open:  # the consumer has something else to do until the engine is done
                    await asyncio.sleep(0.001)
                items += [item async for item in generation]
        assert len(items) <= 3  # the first may have come alone or with others; the rest waited together
        assert tokens_of(items, 0) == [5, 6, 7] * 13 + [5]
        assert [entry.token_id for _, output in items for entry in output.logprobs or ()] == tokens_of(items, 0)
        assert [output.finish_reason for _, output in items] == [*[None] * (len(items) - 1), "length"]

    run(scenario)


def test_outputs_of_two_jobs_keep_their_tokens_apart_when_they_wait() -> None:
    async def scenario() -> None:
        async with running(FakeEngine()) as engine:
            generation = engine.submit("r", [job(5, max_tokens=9), job(7, max_tokens=30)])
            while engine.num_open:
                await asyncio.sleep(0.001)
            items = await collect(generation)
        assert (tokens_of(items, 0), tokens_of(items, 1)) == ([5] * 9, [7] * 30)
        assert len(items) < 39

    run(scenario)


def test_a_job_of_several_sequences_comes_before_the_next_jobs() -> None:
    async def scenario() -> None:
        async with running(FakeEngine()) as engine:
            several = Job(prompt_token_ids=(5, 6), params=SamplingParams(n=2, max_tokens=3))
            generation = engine.submit("r", [several, job(7, max_tokens=2)])
            assert engine.num_open == 3
            items = await collect(generation)
        assert [tokens_of(items, index) for index in range(3)] == [[5, 6, 5], [5, 6, 5], [7, 7]]

    run(scenario)


def test_a_failure_takes_no_tokens_with_it() -> None:
    async def scenario() -> None:
        async with running(FakeEngine()) as engine:
            generation = Generation(engine, "r", ["r-0"])
            generation.put((0, RequestOutput(request_id="r-0", token_ids=(5,))))
            generation.put((0, RequestOutput(request_id="r-0", token_ids=(6,))))
            generation.put((0, RequestOutput(request_id="r-0", token_ids=(), finish_reason="error", error="no")))
            assert (await anext(generation))[1].token_ids == (5, 6)
            with pytest.raises(RequestFailedError, match="no"):
                await anext(generation)

    run(scenario)


def test_an_abort_that_joins_tokens_keeps_their_logprobs() -> None:
    async def scenario() -> None:
        async with running(FakeEngine()) as engine:
            generation = Generation(engine, "r", ["r-0"])
            entry = TokenLogprobs(token_id=5, logprob=-1.0)
            generation.put((0, RequestOutput(request_id="r-0", token_ids=(5,), logprobs=(entry,))))
            generation.put((0, RequestOutput(request_id="r-0", token_ids=(), finish_reason="abort")))
            [(_, output)] = await collect(generation)
            assert (output.token_ids, output.logprobs, output.finish_reason) == ((5,), (entry,), "abort")

    run(scenario)


def test_a_call_to_an_idle_engine_makes_no_step() -> None:
    async def scenario() -> None:
        fake, steps = FakeEngine(), []
        async with running(fake) as engine:
            engine.on_step_end = lambda step_s, lag_s: steps.append(step_s)
            assert await engine.call(lambda _: 5) == 5
            assert await engine.flush() == 7
            assert (fake.num_steps, steps) == (0, [])
            await collect(engine.submit("r", [job(5, max_tokens=2)]))
            assert fake.num_steps == len(steps) == 2

    run(scenario)
