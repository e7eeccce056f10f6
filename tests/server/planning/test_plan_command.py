"""`jaxserve plan` against a server whose capacity is known: one request at a time, a fixed time each."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from live_server import serving_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from jaxserve.simulation.step_times import StepTime, StepTimes
from server.cli.main import run

SERVICE_S = 0.05


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[str]:
    place = asyncio.Semaphore(1)

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "slow"}]})

    async def chat(request: Request) -> StreamingResponse:
        body = await request.json()
        words = len(body["messages"][0]["content"].split())

        async def events() -> AsyncIterator[str]:
            async with place:
                await asyncio.sleep(SERVICE_S)
            for delta in ("a", "b"):
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': delta}}]})}\n\n"
            usage = {"prompt_tokens": words + 4, "completion_tokens": 2}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    with serving_app(Starlette(routes=routes)) as url:
        yield url


@pytest.mark.slow
def test_the_knee_of_a_queue_is_its_capacity(
    one_at_a_time: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evenly spaced arrivals wait for nobody below it, and for ever longer above."""
    written = [tmp_path / name for name in ("plan.json", "plan.html")]
    arguments = ["--slo", "ttft_p95=80ms", "--arrivals", "constant", "--requests", "40", "--trial", "1s"]
    arguments += ["--concurrency", "8", "--tolerance", "0.1", "--json", str(written[0]), "--html", str(written[1])]
    assert run(["plan", "--url", one_at_a_time, *arguments]) == 0
    found = json.loads(written[0].read_text())["candidates"][0]
    # Timers are late on a busy machine, never early, and the load generator may be late then, too.
    assert 0.4 / SERVICE_S < found["capacity"] < 1.02 / SERVICE_S
    assert 0.85 < found["knee"] / found["capacity"] < 1.2
    # A search this coarse may end at the capacity, with nothing above it tried.
    assert found["breaks_by"] in (None, "queue", "client")
    assert "the promise holds up to" in capsys.readouterr().out
    assert written[1].read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--slo", "ttft=1s"], "write ttft_p95"),
        (["--slo", "speed_p95=1s"], "speed_p95=1s"),
        (["--slo", "ttft_p95=1s", "--url", "http://127.0.0.1:1", "--simulate"], "--url is a server as it is"),
        (
            ["--slo", "ttft_p95=1s", "--url", "http://127.0.0.1:1", "--output", "best.yaml"],
            "--url is a server as it is",
        ),
        (["--slo", "ttft_p95=1s", "--vary", "scheduler.policy"], "write a key and its values"),
        (["--slo", "ttft_p95=1s", "--vary", "scheduler.max_seqs=4"], "max_seqs"),
        (["--slo", "ttft_p95=1s", "--vary", "scheduler.policy=fcfs,luck"], "luck"),
        (["--slo", "ttft_p95=1s", "--json", "/nowhere/plan.json"], "there is no folder /nowhere"),
        (["--slo", "ttft_p95=1s", "--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
        (["--slo", "ttft_p95=1s", "--simulate", "--workload", "multi-turn"], "multi-turn"),
    ],
)
def test_what_cannot_be_planned_is_said_before_anything_starts(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *flags]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_a_simulated_search_is_confirmed_on_servers_of_its_own(
    tiny_model: Path,
    tmp_path: Path,
    program_cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = ["--model", str(tiny_model), "--max-model-len", "128", "--set", "cache.num_pages=65"]
    settings += ["--set", "scheduler.max_num_seqs=2", "--set", "scheduler.max_num_batched_tokens=34"]
    settings += ["--set", "execution.decode_buckets=[2]", "--set", "execution.prefill_buckets=[1]"]
    settings += ["--set", f"execution.compilation_cache={program_cache}"]
    table = [StepTime(decode_rows=2, prefill_blocks=blocks, kv_tokens=16, seconds=0.01) for blocks in (0, 1)]
    times = tmp_path / "times.json"
    StepTimes(device="none", jax_version="0", model="tiny", config_digest="", block_q=32, steps=tuple(table)).write(
        times
    )
    best = tmp_path / "best.yaml"
    traffic = ["--input-tokens", "16", "--output-tokens", "8", "--requests", "20", "--trial", "1s"]
    asked = ["--slo", "e2e_p50=60s", "--tolerance", "0.5", "--output", str(best)]
    assert (
        run(
            [
                "plan",
                "--simulate",
                "--times",
                str(times),
                "--vary",
                "scheduler.policy=fair",
                *asked,
                *traffic,
                *settings,
            ]
        )
        == 0
    )
    told = capsys.readouterr()
    assert told.err.count("starting a server") == 2
    assert told.err.count(": simulated ") == 2
    assert "nothing broke up to there" in told.out
    assert str(tiny_model) in best.read_text()
    assert run(["config", "show", "--config", str(best)]) == 0, "what is recommended can be served"
