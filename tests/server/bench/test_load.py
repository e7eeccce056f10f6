"""Times and tokens of requests against scripted servers, over real sockets and to the microsecond."""

import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme
from scripted_server import (
    HEAD,
    LAST,
    ScriptedServer,
    Step,
    delta,
    event,
    http_chunk,
    plain,
    scripted_server,
    stream,
    usage,
)
from virtual_time import run_virtual

from server.bench.http import HttpClient
from server.bench.load import ClosedLoop, Conversation, Target, run_load
from server.bench.result import Result
from server.bench.sse import MAX_EVENT_BYTES

US = 1e-6


def ask(script: Sequence[Step], **fields: Any) -> Conversation:
    return Conversation(turns=({"messages": [{"role": "user", "content": "Hi"}], "script": list(script), **fields},))


def results_of(
    conversations: Sequence[Conversation],
    arrivals: Sequence[float] | ClosedLoop | None = None,
    *,
    max_concurrency: int | None = None,
    timeout_s: float = 30.0,
    stall_s: float = 5.0,
) -> list[Result]:
    async def run() -> list[Result]:
        async with scripted_server() as server:
            http = HttpClient(server.url)
            target = Target(http=http, model="m", extras={}, timeout_s=timeout_s, stall_s=stall_s)
            try:
                return await run_load(
                    target,
                    [0.0] * len(conversations) if arrivals is None else arrivals,
                    conversations,
                    max_concurrency=max_concurrency,
                )
            finally:
                await http.close()

    return sorted(run_virtual(run()), key=lambda result: result.index)


def result_of(script: Sequence[Step], **options: Any) -> Result:
    (result,) = results_of([ask(script)], **options)
    return result


def times(result: Result) -> list[tuple[int, int]]:
    """Milliseconds and tokens of each chunk."""
    return [(round(chunk.time_s * 1e3), chunk.tokens) for chunk in result.chunks]


# --- a reply that is as it should be ---

GOOD = [
    (5.0, delta("")),  # the role alone: no token
    (120.0, delta("Hel")),
    (150.0, delta("lo")),
    (210.0, delta(" you")),
    (210.0, delta(finish="stop")),
    (215.0, usage(7, 3, prompt_tokens_details={"cached_tokens": 4})),
]


def test_every_time_of_a_reply_is_the_scripts() -> None:
    result = result_of(stream(GOOD, 220.0), arrivals=[0.5])
    assert result.ok
    assert result.oddities == ()
    assert result.scheduled_s == 0.5
    assert result.ttft_s == pytest.approx(0.120, abs=US)
    assert result.server_ttft_s == pytest.approx(0.120, abs=US)
    assert result.e2e_s == pytest.approx(0.220, abs=US)
    assert result.tpot_s == pytest.approx(0.045, abs=US)
    assert [gap.seconds for gap in result.token_gaps()] == pytest.approx([0.030, 0.060], abs=US)
    assert (result.prompt_tokens, result.cached_tokens, result.output_tokens) == (7, 4, 3)
    assert result.text == "Hello you"
    assert result.finish_reason == "stop"


def test_times_do_not_depend_on_where_the_stream_is_split() -> None:
    """The last byte of a token's event decides when it came; the bytes before it may come at any time."""
    whole = [event(chunk) for _, chunk in GOOD] + [event("[DONE]")]
    body = "".join(whole)
    ends = [len("".join(whole[: number + 1])) for number in range(len(whole))]
    at_ms = [at for at, _ in GOOD] + [220.0]
    first_token_event = 1

    def script(split: int) -> list[Step]:
        """Everything up to `split` as soon as it is due; byte `split` and on only with the event that it ends."""
        steps: list[Step] = [(0, HEAD)]
        sent = 0
        for end, at in zip(ends, at_ms, strict=True):
            for upto in (split, end):
                if sent < upto <= end:
                    steps.append((at if upto == end else at - 1.0, http_chunk(body[sent:upto])))
                    sent = upto
        return [*steps, (220.0, LAST)]

    conversations = [ask(script(split)) for split in range(1, len(body))]
    results = results_of(conversations)
    for split, result in enumerate(results, 1):
        assert result.ok, (split, result.detail)
        assert times(result) == [(120, 1), (150, 1), (210, 1)], split
        assert result.ttft_s == pytest.approx(at_ms[first_token_event] / 1e3, abs=US)
        assert result.e2e_s == pytest.approx(0.220, abs=US)
        assert (result.output_tokens, result.prompt_tokens) == (3, 7)


@pytest.mark.parametrize("line_end", ["\r\n", "\r"])
def test_a_stream_with_other_line_ends_comments_and_no_spaces_is_read_the_same(line_end: str) -> None:
    def odd(chunk: Any) -> str:
        text = json.dumps(chunk, indent=1) if isinstance(chunk, dict) else chunk
        return ": ping\n\n" + "".join(f"data:{line}\n" for line in text.split("\n")) + "\n"

    steps: list[Step] = [(0, HEAD), (1, http_chunk(": a comment\n\n".replace("\n", line_end)))]
    steps += [(at_ms, http_chunk(odd(chunk).replace("\n", line_end))) for at_ms, chunk in GOOD]
    steps.append((220, http_chunk(odd("[DONE]").replace("\n", line_end)) + LAST))
    result = result_of(steps)
    assert result.ok, result.detail
    assert times(result) == [(120, 1), (150, 1), (210, 1)]
    assert result.e2e_s == pytest.approx(0.220, abs=US)


def test_the_first_token_of_any_channel_counts() -> None:
    call = {"index": 0, "function": {"name": "look", "arguments": ""}}
    channels: dict[str, dict[str, Any]] = {
        "reasoning_content": {"delta": {"reasoning_content": "hm"}},
        "reasoning": {"delta": {"reasoning": "hm"}},
        "tool call": {"delta": {"tool_calls": [call]}},
        "a completion's text": {"text": "hm"},
        "no text yet": {"delta": {}, "token_ids": [5]},
    }
    for name, choice in channels.items():
        first = {"choices": [{"index": 0, **choice}]}
        timeline = [(40.0, first), (90.0, delta("a", token_ids=[6])), (90.0, delta(finish="stop"))]
        result = result_of(stream([*timeline, (90.0, usage(1, 2))], 100.0))
        assert result.ok, name
        assert result.ttft_s == pytest.approx(0.040, abs=US), name
        assert result.output_tokens == 2, name


# --- tokens that come together ---


def test_several_tokens_in_a_chunk_are_counted_by_the_best_evidence() -> None:
    def running(text: str, total: int) -> dict[str, Any]:
        return {**delta(text), "usage": {"prompt_tokens": 4, "completion_tokens": total}}

    cases = {
        "usage": [running("a", 1), running("b c d", 4), running("e", 5)],
        "token_ids": [delta("a", token_ids=[1]), delta("b c d", token_ids=[2, 3, 4]), delta("e", token_ids=[5])],
        "logprobs": [
            delta(text, logprobs={"content": [{}] * count}) for text, count in (("a", 1), ("b c d", 3), ("e", 1))
        ],
        "text": [delta("aaaa"), delta("bbbbccccdddd"), delta("eeee")],
    }
    for counted_by, chunks in cases.items():
        timeline: list[tuple[float, Any]] = [(at, chunk) for at, chunk in zip((50, 110, 130), chunks, strict=True)]
        result = result_of(stream([*timeline, (130, delta(finish="length")), (130, usage(4, 5))], 130))
        assert (result.counted_by, result.oddities) == (counted_by, ())
        assert times(result) == [(50, 1), (110, 3), (130, 1)], counted_by
        # Three tokens 60 ms after the first are three gaps of 20 ms, one of 60 for the eye.
        assert [(round(gap.seconds, 6), gap.tokens) for gap in result.token_gaps()] == [(0.02, 3), (0.02, 1)]
        assert result.chunk_gaps() == pytest.approx([0.06, 0.02], abs=US)
        assert result.tpot_s == pytest.approx(0.020, abs=US)


def test_a_usage_that_cannot_be_true_is_told_and_not_believed() -> None:
    three = [(50, delta("a")), (60, delta("b")), (70, delta("c")), (70, delta(finish="stop"))]
    with_ids = [
        (50, delta("a", token_ids=[1])),
        (60, delta("b", token_ids=[2])),
        (70, delta("c", token_ids=[3])),
        (70, delta(finish="stop")),
    ]
    wrong = {
        "far more than there is text for": (three, usage(3, 900)),
        "none, where there is text": (three, usage(3, 0)),
        "other than the token ids": (with_ids, usage(3, 30)),
        "negative": (three, usage(3, -1)),
        "no number": (three, usage(3, "3")),
        "true": (three, usage(3, True)),
        "more cached than there is prompt": (three, usage(3, 3, prompt_tokens_details={"cached_tokens": 4})),
    }
    for name, (timeline, chunk) in wrong.items():
        result = result_of(stream([*timeline, (70, chunk)], 80))
        assert result.ok, name
        assert "wrong usage" in result.oddities, name
        assert result.output_tokens == 3, name
        assert result.cached_tokens is None, name
    missing = result_of(stream(three, 80))
    assert (missing.ok, missing.oddities, missing.output_tokens) == (True, ("no usage",), 3)


def test_a_token_that_ends_the_sequence_unseen_is_no_contradiction() -> None:
    timeline = [(50, delta("a", token_ids=[1])), (70, delta("b", token_ids=[2])), (70, delta(finish="stop"))]
    result = result_of(stream([*timeline, (70, usage(3, 3))], 80))
    assert (result.oddities, result.output_tokens) == ((), 3)
    assert result.tpot_s == pytest.approx(0.020, abs=US)


def test_a_reply_that_ends_at_once_has_its_token_when_it_ends() -> None:
    result = result_of(stream([(30, delta("")), (50, delta(finish="stop")), (55, usage(3, 1))], 60))
    assert result.ok
    assert result.ttft_s == pytest.approx(0.050, abs=US)
    assert (result.output_tokens, result.tpot_s) == (1, None)


# --- servers that misbehave ---

HALF: list[tuple[float, Any]] = [(50, delta("a")), (70, delta("b"))]
BAD: dict[str, tuple[list[Step], str, float, str]] = {
    # name: script, failure, seconds to its end, a part of its detail
    "a refusal for too many": (
        [(5, plain(429, '{"error": {"message": "slow down"}}'))],
        "rate_limited",
        0.005,
        "slow down",
    ),
    "an error's status": ([(5, plain(500, "oh no", "text/plain"))], "http_error", 0.005, "500: oh no"),
    "an error in the stream": (
        [*stream(HALF, 0, ends=False), (90, http_chunk(event({"error": {"message": "out of pages"}})))],
        "stream_error",
        0.090,
        "out of pages",
    ),
    "an error event": (
        [*stream(HALF, 0, ends=False), (90, http_chunk('event: error\ndata: {"message": "bad"}\n\n'))],
        "stream_error",
        0.090,
        "bad",
    ),
    "a reset in the stream": ([*stream(HALF, 0, ends=False), (90, "RST")], "closed_early", 0.090, "reset"),
    "a close in the stream": ([*stream(HALF, 0, ends=False), (90, None)], "closed_early", 0.090, "middle"),
    "a close without a reply": ([(90, None)], "closed_early", 0.090, "without a reply"),
    "a body that ends whole, and too early": (
        [*stream(HALF, 0, ends=False), (90, LAST)],
        "closed_early",
        0.090,
        "neither a finish_reason nor [DONE]",
    ),
    "an event cut short": (
        [*stream(HALF, 0, ends=False), (90, http_chunk('data: {"choices": [')), (91, LAST)],
        "malformed",
        0.091,
        "not JSON",
    ),
    "an event that is no JSON": (
        [*stream(HALF, 0, ends=False), (90, http_chunk("data: hello\n\n"))],
        "malformed",
        0.090,
        "hello",
    ),
    "a line without end": (
        [*stream(HALF, 0, ends=False), *((80 + at, http_chunk("x" * 65536)) for at in range(100))],
        "malformed",
        0.080 + 0.064,  # with the 65th piece
        f"longer than {MAX_EVENT_BYTES} bytes",
    ),
    "an event without end": (
        [*stream(HALF, 0, ends=False), *((80 + at, http_chunk("data: x\n" * 8192)) for at in range(100))],
        "malformed",
        0.080 + 0.073,  # of each 8 bytes, the line's end is not held
        f"longer than {MAX_EVENT_BYTES} bytes",
    ),
    "no event stream": ([(5, plain(200, '{"choices": []}'))], "malformed", 0.005, "application/json"),
    "no HTTP": ([(5, "+OK hello\r\n\r\n")], "malformed", 0.005, "no HTTP"),
    "a length that lies": ([(5, HEAD), (50, "zz\r\nhello\r\n")], "malformed", 0.050, "no HTTP"),
    "silence after a token": (stream(HALF, 0, ends=False), "stalled", 5.070, "silent for 5 s"),
    "silence from the beginning": ([], "timeout", 30.0, "30 s"),
    "a header and no more": ([(0, HEAD)], "timeout", 30.0, "30 s"),
    "pings for ever": (
        [(0, HEAD), *((at * 1e3, http_chunk(": ping\n\n")) for at in range(1, 60))],
        "timeout",
        30.0,
        "30 s",
    ),
    "a stream without tokens": (stream([(5, delta(finish="stop"))], 10), "empty", 0.010, "no token"),
    "the end alone": (stream([], 10), "empty", 0.010, "no token"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_server_that_misbehaves_is_counted_as_what_it_is(name: str) -> None:
    script, failure, end_s, detail = BAD[name]
    result = result_of(script)
    assert result.failure == failure
    assert detail in result.detail
    assert result.e2e_s == pytest.approx(end_s, abs=US)


def test_nobody_listening_is_told_as_that() -> None:
    async def run() -> list[Result]:
        async with scripted_server() as server:
            url = server.url
        target = Target(http=HttpClient(url), model="m", extras={})
        return await run_load(target, [0.0], [ask([])])

    (result,) = run_virtual(run())
    assert (result.failure, result.sent_s) == ("connect", None)
    assert "cannot connect" in result.detail


def test_tls_is_spoken_and_a_stranger_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    async def run() -> Result:
        listening = await ScriptedServer().listen(tls=context)
        http = HttpClient(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        (result,) = await run_load(Target(http=http, model="m", extras={}), [0.0], [ask(stream(GOOD, 220.0))])
        await http.close()
        listening.close()
        return result

    stranger = run_virtual(run())
    assert stranger.failure == "connect"
    assert "certificate verify failed" in stranger.detail
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    known = run_virtual(run())
    assert known.ok
    assert known.server_ttft_s == pytest.approx(0.120, abs=US)


def test_an_end_without_done_is_odd_and_no_failure() -> None:
    timeline = [*HALF, (80.0, delta(finish="stop")), (80.0, usage(3, 2))]
    result = result_of([*stream(timeline, 0, ends=False), (90, LAST)])
    assert (result.failure, result.oddities) == (None, ("no [DONE]",))
    assert result.e2e_s == pytest.approx(0.090, abs=US)


def test_a_body_that_ends_with_the_connection_is_whole() -> None:
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    done = event(delta("a")) + event(delta(finish="stop")) + event(usage(1, 1)) + event("[DONE]")
    result = result_of([(0, head), (50, done), (70, None)])
    assert (result.failure, result.oddities) == (None, ())
    assert result.e2e_s == pytest.approx(0.050, abs=US)


# --- when requests are sent ---


def test_an_open_loop_counts_from_the_deadline_however_slow_the_server_is() -> None:
    """Ten arrivals 100 ms apart; the server answers none before second 5: no omission, coordinated or other."""
    arrivals = [number / 10 for number in range(10)]

    def until_five(arrival: float) -> list[Step]:
        at_ms = (5 - arrival) * 1e3
        return stream([(at_ms, delta("a")), (at_ms, delta(finish="stop")), (at_ms, usage(1, 1))], at_ms)

    results = results_of([ask(until_five(arrival)) for arrival in arrivals], arrivals)
    assert [result.scheduled_s for result in results] == arrivals
    assert [result.sent_s for result in results] == pytest.approx(arrivals, abs=US)
    assert [result.ttft_s for result in results] == pytest.approx([5 - arrival for arrival in arrivals], abs=US)


def second_long() -> list[Step]:
    return stream([(500, delta("a")), (1000, delta("b")), (1000, delta(finish="stop")), (1000, usage(1, 2))], 1000)


def test_what_the_client_holds_back_is_shown_as_its_own_wait_and_counted() -> None:
    results = results_of([ask(second_long()) for _ in range(4)], [0.0, 0.1, 0.2, 0.3], max_concurrency=1)
    assert [result.client_wait_s for result in results] == pytest.approx([0, 0.9, 1.8, 2.7], abs=US)
    assert [result.server_ttft_s for result in results] == pytest.approx([0.5] * 4, abs=US)
    assert [result.ttft_s for result in results] == pytest.approx([0.5, 1.4, 2.3, 3.2], abs=US)


def test_a_closed_loop_keeps_its_users_and_ends_with_its_time() -> None:
    forever = (ask(second_long()) for _ in iter(int, 1))
    results = results_of(forever, ClosedLoop(concurrency=3, duration_s=2.5))  # type: ignore[arg-type]
    starts = sorted(result.scheduled_s for result in results)
    assert starts == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2], abs=US)
    thinking = results_of([ask(second_long()) for _ in range(3)], ClosedLoop(concurrency=1, think_s=0.25))
    assert [result.scheduled_s for result in thinking] == pytest.approx([0, 1.25, 2.5], abs=US)


def test_a_conversation_sends_the_servers_own_replies_back() -> None:
    turn = {"messages": [{"role": "user", "content": "And?"}], "script": second_long()}

    async def run() -> tuple[list[Result], list[Any]]:
        async with scripted_server() as server:
            http = HttpClient(server.url)
            conversation = Conversation(turns=(turn, turn, turn), think_s=0.5)
            results = await run_load(Target(http=http, model="m", extras={}), [0.0], [conversation])
            await http.close()
            return results, server.bodies

    results, bodies = run_virtual(run())
    assert [(result.turn, round(result.scheduled_s, 6)) for result in results] == [(0, 0), (1, 1.5), (2, 3.0)]
    asked, replied = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "ab"}
    assert bodies[2]["messages"] == [asked, replied, asked, replied, asked]


def test_a_failed_turn_ends_its_conversation() -> None:
    good = {"messages": [{"role": "user", "content": "a"}], "script": second_long()}
    bad = {**good, "script": [(1, plain(500, "no"))]}
    results = results_of([Conversation(turns=(good, bad, good))])
    assert [result.failure for result in results] == [None, "http_error"]


def test_connections_are_used_again_while_they_are_fresh() -> None:
    async def run(think_s: float) -> int:
        async with scripted_server() as server:
            http = HttpClient(server.url)
            conversations = [ask(second_long()) for _ in range(3)]
            users = ClosedLoop(concurrency=1, think_s=think_s)
            assert all(
                result.ok for result in await run_load(Target(http=http, model="m", extras={}), users, conversations)
            )
            await http.close()
            return server.num_connections

    assert run_virtual(run(0.1)) == 1
    assert run_virtual(run(4.0)) == 3  # servers close what idles for longer
