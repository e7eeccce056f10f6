"""What is asked of a server before it is loaded, and what becomes of one that refuses parts of it."""

import pytest
from scripted_server import ScriptedServer, scripted_server
from virtual_time import run_virtual

from server.bench.errors import BenchError
from server.bench.http import HttpClient
from server.bench.probe import Probe, probe


def probe_of(
    model: str | None = None, *, refused: tuple[str, ...] = (), model_list: object = None, counts_streams: bool = True
) -> Probe:
    async def run() -> Probe:
        server: ScriptedServer
        async with scripted_server() as server:
            server.refused_fields = refused
            server.counts_streams = counts_streams
            if model_list is not None:
                server.model_list = model_list
            http = HttpClient(server.url)
            try:
                return await probe(http, model=model, api="chat", full_length=True)
            finally:
                await http.close()

    return run_virtual(run())


def test_a_server_that_takes_everything_is_asked_for_everything() -> None:
    probed = probe_of()
    assert probed.model == "scripted"
    assert probed.extras == {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }
    assert probed.notes == ()
    assert (probed.length.per_word, probed.length.fixed) == (1.0, 10.0)
    assert probed.length.words(256) == 246


def test_what_a_server_refuses_is_left_out_and_told() -> None:
    probed = probe_of("mine", refused=("ignore_eos", "continuous_usage_stats"))
    assert probed.model == "mine"
    assert probed.extras == {"stream_options": {"include_usage": True}, "return_token_ids": True}
    assert probed.notes == ("the server refuses ignore_eos: replies may be shorter than asked for",)


def test_prompts_are_counted_without_a_stream_where_streams_do_not_count() -> None:
    probed = probe_of(counts_streams=False)
    assert (probed.length.per_word, probed.length.fixed) == (1.0, 10.0)
    assert probed.notes == ("the server counts no tokens in streams: they are counted by what came",)


def test_a_server_that_answers_nothing_is_told() -> None:
    with pytest.raises(BenchError, match=r"short request \(http_error\): 400: unknown parameter model"):
        probe_of(refused=("model",))
    with pytest.raises(BenchError, match="lists no model; name one"):
        probe_of(model_list={"data": []})
