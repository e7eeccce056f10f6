"""Splits a byte stream into server-sent events (WHATWG HTML, 9.2.6); knows nothing of what is in them."""

import re
from typing import NamedTuple

# An event of a reply is a token or a few; one of 20 logprobs for each of a thousand tokens is still below this.
MAX_EVENT_BYTES = 4 << 20
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    kind: str  # "message" unless the stream names another
    data: str


class EventTooLongError(Exception):
    """More came than an event may have, and no end of it."""

    def __init__(self) -> None:
        super().__init__(f"an event is longer than {MAX_EVENT_BYTES} bytes")


class EventParser:
    """Takes bytes as they come, split anywhere, and gives each event as soon as its last byte is there.

    Lines may end in LF, CR LF or CR. A CR ends its line at once, for the next byte may be long in coming; an LF that
    then follows belongs to it. What is not yet an event is held, up to MAX_EVENT_BYTES.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._at_start = True
        self._after_cr = False
        self._kind = ""
        self._data: list[str] = []
        self._held = 0  # bytes of the lines in `_data`

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes completed. Raises EventTooLongError, after which the stream is not to be read."""
        if b"\n" not in data and b"\r" not in data and not self._at_start:
            # The middle of a line. A long one is not to be looked through again with each of its pieces.
            self._rest += data
            self._after_cr = self._after_cr and not data
            self._check()
            return []
        buffer = bytes(self._rest) + data
        if self._at_start:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._rest = bytearray(buffer)
                return []
            buffer = buffer.removeprefix(_BOM)
            self._at_start = False
        if self._after_cr and buffer:
            buffer = buffer.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in buffer:
            *lines, rest = _LINE_END.split(buffer)
            self._after_cr = buffer.endswith(b"\r")
        else:
            *lines, rest = buffer.split(b"\n")
        self._rest = bytearray(rest)
        events: list[Event] = []
        for line in lines:
            self._line(line, events)
        self._check()
        return events

    def close(self) -> list[Event]:
        """The event that the end of the stream cut short of its blank line, if there is one.

        The standard drops it. A caller that wants to know what the server sent looks at it.
        """
        events: list[Event] = []
        if self._rest:
            self._line(bytes(self._rest), events)
        self._rest.clear()
        self._line(b"", events)
        return events

    def _check(self) -> None:
        if self._held + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLongError

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._kind or "message", "\n".join(self._data)))
                self._data = []
                self._held = 0
            self._kind = ""
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode(errors="replace"))
            self._held += len(line)
        elif name == b"event":
            self._kind = value.removeprefix(b" ").decode(errors="replace")
        # An empty name is a comment; id and retry are for clients that connect again.
