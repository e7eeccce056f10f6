"""The conformance cases: this server passes them, a careless one does not."""

import asyncio
import json
from collections import Counter

import pytest
from live_server import LiveServer, serving_app
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.cli.main import run as run_command
from server.conformance.case import FailedError
from server.conformance.client import read_events
from server.conformance.run import CASES, print_results, run_cases


def test_there_are_cases_of_every_kind_and_no_claim_stands_twice() -> None:
    assert len(CASES) >= 120
    assert min(Counter(case.kind for case in CASES).values()) >= 10
    assert len({case.claim for case in CASES}) == len(CASES)


def test_this_server_passes_every_case(server: LiveServer) -> None:
    results = asyncio.run(run_cases(server.url))
    print_results(results, Console(width=160))
    failed = [f"{result.case.claim}: {result.reason}" for result in results if result.outcome == "failed"]
    assert not failed, "\n".join(failed)
    skipped = {result.case.claim for result in results if result.outcome == "skipped"}
    assert skipped <= {"nothing is served without the key", "penalties change what repeats"}, skipped


def test_a_careless_server_fails_most_cases(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(_: Request) -> Response:
        choice = {"index": 0, "text": "hello", "message": {"role": "assistant", "content": "hello"}}
        return JSONResponse({"choices": [choice], "data": [{"id": "careless"}]})

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    with serving_app(app) as url:
        status = run_command(["conformance", "--url", url, "--kind", "streams", "--kind", "parameters"])
    assert status == 1
    told = capsys.readouterr().out
    assert "the stream's content-type is 'application/json'" in told
    assert "answered 200, not 400 or 422" in told


def test_no_server_at_the_url_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["conformance", "--url", "http://127.0.0.1:9"]) == 2
    assert "names no model" in capsys.readouterr().err


CHUNK = json.dumps({"choices": []})


@pytest.mark.parametrize(
    ("stream", "otherwise"),
    [
        (f"data: {CHUNK}\n\n", "without [DONE]"),
        (f"data: [DONE]\n\ndata: {CHUNK}\n\n", "after [DONE]"),
        ("data: {\n\ndata: [DONE]\n\n", "no JSON"),
        ('data: {"x": NaN}\n\ndata: [DONE]\n\n', "NaN is not JSON"),
        (f"{CHUNK}\n\ndata: [DONE]\n\n", "no field"),
    ],
)
def test_a_broken_stream_is_named(stream: str, otherwise: str) -> None:
    with pytest.raises(FailedError) as caught:
        read_events(stream.encode())
    assert otherwise in str(caught.value)


def test_comments_carriage_returns_and_missing_spaces_are_a_stream_too() -> None:
    raw = f": ping\r\n\r\ndata:{CHUNK}\r\n\r\nevent: x\r\ndata: {CHUNK}\r\n\r\ndata: [DONE]\r\n\r\n"
    assert read_events(raw.encode()) == [{"choices": []}] * 2
