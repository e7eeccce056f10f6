"""One reply's reader, for what no server should send."""

from server.bench.reply import ReplyReader


def read(*events: str) -> ReplyReader:
    reader = ReplyReader()
    for event in events:
        reader.feed(f"data: {event}\n\n".encode(), 1.0)
    reader.close(1.0)
    return reader


def test_json_too_deep_to_read_is_malformed() -> None:
    assert read("[" * 100_000).failure == "malformed"


def test_half_a_character_counts_as_text() -> None:
    chunk = '{"choices": [{"index": 0, "text": "\\ud83d", "finish_reason": "stop"}], "usage": %s}'
    reader = read(chunk % '{"prompt_tokens": 1, "completion_tokens": 2}', "[DONE]")
    assert (reader.failure, reader.tokens().output_tokens) == (None, 2)
