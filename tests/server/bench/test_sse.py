"""The event parser gives the same events however the bytes are split."""

import pytest

from server.bench.sse import MAX_EVENT_BYTES, Event, EventParser, EventTooLongError

STREAMS = {
    "lf": (b"data: one\n\ndata: two\n\n", ["one", "two"]),
    "crlf": (b"data: one\r\n\r\ndata: two\r\n\r\n", ["one", "two"]),
    "cr": (b"data: one\r\rdata: two\r\r", ["one", "two"]),
    "mixed": (b"data: one\r\n\ndata: two\n\r\n", ["one", "two"]),
    "no space": (b"data:one\n\ndata:  two\n\n", ["one", " two"]),
    "comments": (b": ping\n\n:\ndata: one\n: pong\ndata: more\n\n", ["one\nmore"]),
    "several lines": (b"data: {\ndata: }\r\ndata\n\n", ["{\n}\n"]),
    "byte order mark": (b"\xef\xbb\xbfdata: one\n\n", ["one"]),
    "not ascii": ("data: héé — 漢字 🙂\n\n".encode(), ["héé — 漢字 🙂"]),
    "other fields": (b"id: 7\nretry: 10\ndata: one\nnonsense\ndatax: no\n\n", ["one"]),
    "no data": (b"event: ping\n\ndata: one\n\n", ["one"]),
}


@pytest.mark.parametrize("name", STREAMS)
def test_events_are_the_same_at_every_split_into_three(name: str) -> None:
    stream, expected = STREAMS[name]
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            parser = EventParser()
            pieces = (stream[:first], stream[first:second], stream[second:])
            events = [event for piece in pieces for event in parser.feed(piece)]
            assert [event.data for event in events] == expected, (first, second)
            assert parser.close() == []


@pytest.mark.parametrize("name", STREAMS)
def test_events_are_the_same_byte_by_byte(name: str) -> None:
    stream, expected = STREAMS[name]
    parser = EventParser()
    events = [event for byte in stream for event in parser.feed(bytes([byte]))]
    assert [event.data for event in events] == expected


@pytest.mark.parametrize("end", [b"\n\n", b"\r\r", b"\r\n\r"])
def test_an_event_is_there_as_soon_as_its_last_byte_is(end: bytes) -> None:
    parser = EventParser()
    assert parser.feed(b"data: one" + end[:-1]) == []
    assert parser.feed(end[-1:]) == [Event("message", "one")]


def test_the_kind_of_an_event_is_its_own_only() -> None:
    events = EventParser().feed(b"event: error\ndata: one\n\ndata: two\n\n")
    assert events == [Event("error", "one"), Event("message", "two")]


def test_what_the_end_cut_short_is_told_at_close() -> None:
    parser = EventParser()
    assert parser.feed(b"data: one\n\ndata: [DO") == [Event("message", "one")]
    assert parser.close() == [Event("message", "[DO")]


@pytest.mark.parametrize("piece", [b"x", b"data: x\n", b"data: x\r"])
def test_what_never_becomes_an_event_is_not_held_for_ever(piece: bytes) -> None:
    parser = EventParser()
    pieces = piece * 65536
    for _ in range(MAX_EVENT_BYTES // len(pieces)):
        assert parser.feed(pieces) == []
    with pytest.raises(EventTooLongError):
        parser.feed(pieces * 2)


def test_a_long_event_is_whole_and_comments_are_never_too_many() -> None:
    parser = EventParser()
    text = "y" * (MAX_EVENT_BYTES - 65536)
    for start in range(0, len(text), 4096):
        assert parser.feed((b"" if start else b"data: ") + text[start : start + 4096].encode()) == []
    assert parser.feed(b"\n\n") == [Event("message", text)]
    for _ in range(2 * MAX_EVENT_BYTES // 65536):
        assert parser.feed(b": ping\n\n" * 8192) == []
