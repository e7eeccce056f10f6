"""`jaxserve bench` as a user runs it, against a server in another process."""

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from scripted_server import plain, stream
from server_process import server_process

from server.bench.flags import add_bench_flags, read_plan
from server.cli.main import run

GUIDE = Path(__file__).parents[3] / "docs" / "loadtest.md"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process() as url:
        yield url


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["bench", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


SHORT = ("--output-tokens", "4", "--warmup", "1")


def test_without_a_load_it_runs_one_user_then_few_then_many(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = bench(capsys, "--url", url, "--duration", "300ms", *SHORT)
    assert status == 0
    rows = [line.split() for line in out.splitlines() if "user" in line and not line.startswith("!")]
    assert [(row[0], row[-1]) for row in rows] == [("1", "0"), ("4", "0"), ("16", "0")]
    assert "random texts, 256 tokens in, 4 out" in out
    assert "scripted at 127.0.0.1" in out


def test_one_run_tells_every_percentile_and_its_interval(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    promised = ("--slo", "ttft=10s", "--slo", "tpot=1s")
    status, out, _ = bench(capsys, "--url", url, "--rate", "40", "--requests", "20", *SHORT, *promised)
    assert status == 0
    words = ("mean", "p50", "p99", "first token", "from the socket", "token gap", "end to end", "requests/s offered")
    for word in words:
        assert word in out
    assert "100.0% kept ttft=10 s and tpot=1 s" in out
    assert "20 replies: 5," in out  # 20 prompts of 256 tokens, as the server counted them
    assert "80 output tokens" in out


def test_two_servers_stand_side_by_side(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    servers = ("--url", f"left={url}", "--url", f"right={url}/v1")
    status, out, _ = bench(capsys, *servers, "--concurrency", "1,2", "--requests", "4", *SHORT)
    assert status == 0
    rows = [line.split() for line in out.splitlines() if line.endswith(" 0")]
    assert [row[2 if "user" in row[1] else 0] for row in rows] == ["left", "right", "left", "right"]


def test_json_holds_each_request_and_no_text(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, _, _ = bench(capsys, "--url", url, "--concurrency", "2", "--requests", "6", "--json", str(path), *SHORT)
    assert status == 0
    (told,) = json.loads(path.read_text())["runs"]
    assert told["requests"] == 6
    assert set(told["latencies"]["ttft"]["p95"]) == {"value", "low", "high"}
    requests = told["requests_detail"]
    assert len(requests) == 6
    assert [sum(tokens for _, tokens in request["chunks"]) for request in requests] == [4] * 6
    assert all(request["prompt_tokens"] == 256 for request in requests)
    assert "text" not in requests[0]


def test_all_at_once_is_a_load(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, out, _ = bench(capsys, "--url", url, "--rate", "inf,20", "--requests", "5", "--json", str(path), *SHORT)
    assert status == 0
    assert "5 at once" in out
    first, second = json.loads(path.read_text(), parse_constant=pytest.fail)["runs"]
    assert (first["offered_rate"], first["achieved_rate"]) == (None, None)
    assert [request["scheduled_s"] for request in first["requests_detail"]] == [0.0] * 5
    assert second["requests"] == 5


def test_fields_of_every_request_can_be_given(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--concurrency", "1", "--requests", "3", *SHORT)
    status, out, _ = bench(capsys, "--url", url, *load, "--extra-body", '{"tokens": 2, "temperature": 0.8}')
    assert status == 0
    assert "6 output tokens" in out


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_report_is_one_file_with_plots(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    load = ("--concurrency", "1,3", "--requests", "6", "--html", str(path))
    status, _, _ = bench(capsys, "--url", f"<b>={url}", *load, *SHORT)
    assert status == 0
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert page.tags.count("svg") == 4 + 2 * 6  # against load; and six of each run
    assert page.links == []
    assert "script" not in page.tags
    assert "b" not in page.tags  # names are escaped
    assert "url(" not in text
    assert "nan" not in text.lower()
    assert "prefers-color-scheme:dark" in text


def jsonl(folder: Path, *scripts: Any) -> str:
    path = folder / "requests.jsonl"
    lines = [{"messages": [{"role": "user", "content": "Hi"}], "script": script} for script in scripts]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_failures_past_their_share_make_the_exit_status(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good: list[Any] = stream([(1, {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]})], 1)
    busy = [(1, plain(429, '{"error": {"message": "slow [down]"}}'))]
    load = ("--url", url, "--jsonl", jsonl(tmp_path, good, good, good, busy), "--concurrency", "1", "--warmup", "0")
    status, out, _ = bench(capsys, *load)
    assert status == 1
    assert "1 rate limited: 429: slow [down]" in out
    assert "1 of 4 requests failed" in out
    assert "3 replies: no usage" in out
    assert bench(capsys, *load, "--max-failure-share", "0.25")[0] == 0
    assert bench(capsys, *load, "--max-failure-share", "0.24")[0] == 1


@pytest.mark.parametrize("workload", ["shared-prefix", "multi-turn"])
def test_made_up_workloads(workload: str, url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    lengths = (
        "--prefix-tokens",
        "300",
        "--input-tokens",
        "20-40",
        "--turns",
        "3",
        "--requests",
        "4",
        "--json",
        str(path),
    )
    status, out, _ = bench(capsys, "--url", url, "--workload", workload, "--concurrency", "2", *lengths, *SHORT)
    assert status == 0
    requests = json.loads(path.read_text())["runs"][0]["requests_detail"]
    prompts = [request["prompt_tokens"] for request in requests]
    if workload == "shared-prefix":
        assert "8 shared prefixes of 300 tokens, 20-40 after them" in out
        assert len(prompts) == 4
        assert all(320 <= prompt <= 340 for prompt in prompts)
    else:
        assert "conversations of 3 turns" in out
        assert sorted(request["turn"] for request in requests) == sorted([0, 1, 2] * 4)
        assert min(prompts) < 45 < max(prompts)  # each turn brings those before it along


def test_a_trace_is_replayed_when_its_lines_say(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, told = tmp_path / "trace.jsonl", tmp_path / "out.json"
    path.write_text("".join(f'{{"timestamp": {at}, "input_length": 30, "output_length": 2}}\n' for at in (5, 5.2, 5.6)))
    status, out, _ = bench(
        capsys, "--url", url, "--trace", str(path), "--speed", "2", "--json", str(told), "--warmup", "0"
    )
    assert status == 0
    assert "2 times as fast" in out
    requests = json.loads(told.read_text())["runs"][0]["requests_detail"]
    assert [request["scheduled_s"] for request in requests] == [0, 0.1, 0.3]
    assert [(request["prompt_tokens"], request["output_tokens"]) for request in requests] == [(30, 2)] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "ftp://x"), "must look like http://"),
        (("--url", "http://127.0.0.1:1"), "is the server up"),
        (("--url", "http://a", "--url", "http://a"), "two servers are called a"),
        (("--concurrency", "0"), "--concurrency is '0'"),
        (("--rate", "1..5"), "--duration"),
        (("--arrivals", "gamma", "--rate", "1"), "needs --burstiness"),
        (("--burstiness", "2", "--rate", "1"), "is for --arrivals gamma"),
        (("--max-concurrency", "2"), "--max-concurrency is for --rate"),
        (("--slo", "speed=5"), "must be one of ttft"),
        (("--slo", "ttft_p95=5"), "write ttft=…"),
        (("--duration", "soon"), "no duration"),
        (("--duration", "0s"), "--duration is 0s; it must be positive"),
        (("--workload", "multi-turn", "--api", "completions"), "needs --api chat"),
        (("--trace", "x", "--jsonl", "y"), "brings its own requests"),
        (("--extra-body", "temperature=1"), "--extra-body is no JSON"),
        (("--extra-body", "[]"), "must be a JSON object"),
        (("--extra-body", '{"n": 2, "model": "m"}'), "--extra-body sets model, n, which the load decides"),
        (("--json", "/nowhere/x.json"), "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = bench(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("jaxserve: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("line", re.findall(r"^jaxserve bench.*$", GUIDE.read_text(), flags=re.MULTILINE))
def test_the_guides_commands_are_understood(line: str) -> None:
    parser = argparse.ArgumentParser()
    add_bench_flags(parser)
    assert read_plan(parser.parse_args(shlex.split(line, comments=True)[2:])).servers


def test_what_is_measured_before_an_interrupt_is_still_told(url: str) -> None:
    load = ("--rate", "20,0.01", "--requests", "2", "--output-tokens", "1", "--warmup", "0")
    command = [sys.executable, "-m", "server", "bench", "--url", url, *load]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "0.01 req/s: " in line:  # the second run, which takes a hundred seconds
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "2 replies: 512 prompt tokens, 2 output tokens" in out
